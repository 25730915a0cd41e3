"""Mutants of the configuration by gin."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'objects_made_of_each_other_pass',
        't5x_lite/configuration/checks.py',
        'for reference in references\n                   if reference.evaluate}',
        'for reference in references\n'
        '                   if reference.evaluate and reference.configurable.selector == node[0]}',
        'tests/apps/test_bad_input.py::test_rejected'),
    Mutant(
        'macros_made_of_each_other_pass',
        't5x_lite/configuration/syntax.py',
        'set(macros_in(binding.value)) for name',
        'set(macros_in(binding.value)) & {name} for name',
        'tests/apps/test_bad_input.py::test_bad_files'),
    Mutant(
        'true_is_an_integer',
        't5x_lite/configuration/checks.py',
        ' and (plain is bool or not isinstance(value, bool))',
        '',
        'tests/configuration/test_syntax.py::test_rejected_flags'),
    Mutant(
        'outer_scopes_win',
        't5x_lite/configuration/checks.py',
        'in range(len(scope) + 1):  # Inner',
        'in reversed(range(len(scope) + 1)):  # Inner',
        'tests/configuration/test_syntax.py::test_rejected_flags'),
)
