"""Peer of `finetune_trial.py`: the same fine-tuning by transformers' Seq2SeqTrainer, in an environment of its own.

python benchmarks/finetune_peer.py make FOLDER SEED
python benchmarks/finetune_peer.py train FOLDER STEPS LEARNING_RATE SEED ADAPTER_RANK
"""

import csv
import json
import sys

import torch
import transformers


def make(folder: str, seed: str) -> None:
  """Save a ByT5-like model with new parameters."""
  transformers.set_seed(int(seed))
  config = transformers.T5Config(
    vocab_size=384,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    feed_forward_proj='relu',
    tie_word_embeddings=False,
    decoder_start_token_id=0,
  )
  transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
  transformers.ByT5Tokenizer().save_pretrained(folder)


class Records(torch.utils.data.Dataset):
  """Records of a table as ids."""

  def __init__(self, path: str, tokenizer):
    """Args:
    path: a table with the columns question and answer.
    tokenizer: tokenizer of both.
    """
    with open(path, encoding='utf-8', newline='') as stream:
      rows = list(csv.DictReader(stream))
    self.items = []
    for row in rows:
      item = tokenizer(row['question'])
      item['labels'] = tokenizer(row['answer'])['input_ids']
      self.items.append(item)

  def __len__(self) -> int:
    return len(self.items)

  def __getitem__(self, number: int):
    return self.items[number]


def train(folder: str, steps: str, learning_rate: str, seed: str, adapter_rank: str) -> None:
  """Train, decode the test records, and print the fraction of equal texts as JSON."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(f'{folder}/base')
  model = transformers.T5ForConditionalGeneration.from_pretrained(f'{folder}/base')
  if int(adapter_rank):
    import peft

    model = peft.get_peft_model(
      model,
      peft.LoraConfig(
        task_type='SEQ_2_SEQ_LM',
        r=int(adapter_rank),
        lora_alpha=2 * int(adapter_rank),
        target_modules=['q', 'k', 'v', 'o', 'wi', 'wo'],
      ),
    )
  test = Records(f'{folder}/test.csv', tokenizer)
  trainer = transformers.Seq2SeqTrainer(
    model=model,
    args=transformers.Seq2SeqTrainingArguments(
      output_dir=f'{folder}/peer',
      max_steps=int(steps),
      per_device_train_batch_size=32,
      per_device_eval_batch_size=32,
      learning_rate=float(learning_rate),
      lr_scheduler_type='linear',
      warmup_steps=int(steps) // 10,
      weight_decay=0.0001,
      max_grad_norm=1.0,
      seed=int(seed),
      predict_with_generate=True,
      generation_max_length=16,
      save_strategy='no',
      report_to='none',
    ),
    train_dataset=Records(f'{folder}/train.csv', tokenizer),
    data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model),
    processing_class=tokenizer,
  )
  trainer.train()
  trainer.save_model(f'{folder}/peer')
  predictions = trainer.predict(test).predictions
  predictions[predictions < 0] = tokenizer.pad_token_id
  texts = tokenizer.batch_decode(predictions, skip_special_tokens=True)
  targets = [tokenizer.decode(item['labels'], skip_special_tokens=True) for item in test.items]
  num_equal = sum(text == target for text, target in zip(texts, targets, strict=True))
  print(json.dumps({'exact_match': num_equal / len(targets)}))


if __name__ == '__main__':
  {'make': make, 'train': train}[sys.argv[1]](*sys.argv[2:])
