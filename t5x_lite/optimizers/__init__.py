"""Optimizers with one interface, `OptimizerDef`.

The modules of this package are private; their public names are exported here. `t5x_lite.adafactor` has the names of
Adafactor that T5X has.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {
    't5x_lite.optimizers.adafactor_rule.factor_rules': (
        'FactorDim', 'HEURISTIC_RULE', 'HParamMap', 'HeuristicRule', 'factor_name_to_factordim',
        'standard_logical_factor_rules'),
    't5x_lite.optimizers.adafactor_rule.optimizer': ('Adafactor',),
    't5x_lite.optimizers.adafactor_rule.update': ('relative_step',),
    't5x_lite.optimizers.axes.names': ('match_logical_axes', 'unnamed_axes'),
    't5x_lite.optimizers.axes.rules': ('OptaxStatePartitionRules',),
    't5x_lite.optimizers.base.definition': (
        'EXTRA_ARGS', 'Optimizer', 'OptimizerDef', 'OptimizerDefType', 'OptimizerState', 'OptimizerType'),
    't5x_lite.optimizers.base.state_dicts': ('restore_from_state_dict', 'to_state_dict'),
    't5x_lite.optimizers.base.state_hooks': (
        'register_eval_params', 'register_schedule_count', 'register_state_metrics'),
    't5x_lite.optimizers.base.update_options': ('with_update_options',),
    't5x_lite.optimizers.multi.labels': ('partition',),
    't5x_lite.optimizers.multi.optimizer': ('MultiOptimizer', 'MultiOptimizerState'),
    't5x_lite.optimizers.multi.traversals': ('ModelParamTraversal', 'PathTraversal', 'Traversal'),
    't5x_lite.optimizers.optax_adapter.factories': (
        'acprop', 'adabelief', 'adadelta', 'adafactor', 'adagrad', 'adam', 'adamax', 'adamaxw', 'adamw', 'adan',
        'ademamix', 'adopt', 'amsgrad', 'chain', 'cocob', 'dadapt_adamw', 'dog', 'dowg', 'dpsgd', 'fromage', 'galore',
        'lamb', 'lars', 'lbfgs', 'lion', 'madgrad', 'mechanize', 'momo', 'momo_adam', 'muon', 'nadam', 'nadamw',
        'noisy_sgd', 'novograd', 'optimistic_adam', 'optimistic_adam_v2', 'optimistic_gradient_descent', 'polyak_sgd',
        'prodigy', 'radam', 'reduce_on_plateau', 'rmsprop', 'rprop', 'sam', 'schedule_free', 'schedule_free_adamw',
        'schedule_free_sgd', 'sgd', 'sign_sgd', 'signum', 'simplified_ademamix', 'sm3', 'sophia',
        'split_real_and_imaginary', 'wrap_optax_optimizer', 'yogi'),
    't5x_lite.optimizers.optax_adapter.wrapper': ('OptaxWrapper',),
    't5x_lite.optimizers.scaled_adam_rule.transformation': ('ScaledAdamState', 'scaled_adam'),
    't5x_lite.optimizers.shampoo': ('GraftingType', 'ShampooState', 'distributed_shampoo'),
})
