"""Make `jobset_schema.json` of JobSet's public definition, for the fields of `examples/cluster/jobset.yaml`.

    python -m tests.examples.make_jobset_schema jobset.x-k8s.io_jobsets.yaml

The file is in config/components/crd/bases of the repository kubernetes-sigs/jobset, and contains the schema of the
inner Job. Kept are names, types, required names and the values of enumerations; below fields that the manifest does not
use, nothing is checked.
"""

import json
import pathlib
import sys

import yaml

_FOLDER = pathlib.Path(__file__).parent
_MANIFEST = _FOLDER.parents[1] / 'examples/cluster/jobset.yaml'


def prune(schema, used):
  """Return the schema of a value for the fields that `used`, a list of values, has."""
  kept = {key: schema[key] for key in ('type', 'enum', 'required', 'minimum') if key in schema}
  if schema.get('x-kubernetes-int-or-string'):
    return {'type': ['integer', 'string']}
  if 'properties' in schema:
    kept['additionalProperties'] = False
    kept['properties'] = {}
    for name, child in schema['properties'].items():
      values = [value[name] for value in used if name in value]
      kept['properties'][name] = prune(child, values) if values else True
  elif 'additionalProperties' in schema:
    kept['additionalProperties'] = prune(
      schema['additionalProperties'], [v for value in used for v in value.values()]
    )
  if 'items' in schema:
    kept['items'] = prune(schema['items'], [item for value in used for item in value])
  return kept


def main(path):
  """Write the schema."""
  (version,) = [
    version
    for version in yaml.safe_load(pathlib.Path(path).read_text(encoding='utf-8'))['spec'][
      'versions'
    ]
    if version['name'] == 'v1alpha2'
  ]
  schema = prune(version['schema']['openAPIV3Schema'], [yaml.safe_load(_MANIFEST.read_text())])
  schema['properties'] |= {
    'apiVersion': {'const': 'jobset.x-k8s.io/v1alpha2'},
    'kind': {'const': 'JobSet'},
    'metadata': {'type': 'object', 'required': ['name']},
  }
  schema['required'] = ['apiVersion', 'kind', 'metadata', 'spec']
  (_FOLDER / 'jobset_schema.json').write_text(json.dumps(schema, indent=1, sort_keys=True) + '\n')


if __name__ == '__main__':
  main(sys.argv[1])
