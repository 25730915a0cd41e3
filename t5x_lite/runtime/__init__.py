"""Process of a run, and its cluster: signals, watchdog, events, progress, profiling, memory, compilation cache."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.formatting': ('format_duration', 'format_number'),
    't5x_lite.runtime.compilation_cache': (
      'CacheCounts',
      'count_cache_use',
      'default_folder',
      'disable_compilation_cache',
      'log_compilations',
      'use_compilation_cache',
      'use_default_compilation_cache',
    ),
    't5x_lite.runtime.chips': ('peak_flops',),
    't5x_lite.runtime.cluster': ('ClusterConfig', 'join'),
    't5x_lite.runtime.cluster_environment': ('command_line',),
    't5x_lite.runtime.device_memory': ('DeviceMemory',),
    't5x_lite.runtime.event_log': ('EventLog',),
    't5x_lite.runtime.events': ('Event', 'EVENTS_FILE', 'read_events'),
    't5x_lite.runtime.gc_control': ('manual_gc',),
    't5x_lite.runtime.goodput': ('Goodput', 'measure'),
    't5x_lite.runtime.restart': ('restart_in_utf8', 'restart_with_huge_pages'),
    't5x_lite.runtime.monitor': ('current_monitor', 'Monitor', 'reporting_errors'),
    't5x_lite.runtime.preemption': ('signals_that_end_a_wait', 'StopSignals'),
    't5x_lite.runtime.profiling': ('ProfileConfig', 'StepProfiler'),
    't5x_lite.runtime.progress': ('Progress',),
    't5x_lite.runtime.stacks': ('print_stacks',),
    't5x_lite.runtime.watchdog': ('Watchdog', 'awake_seconds'),
    't5x_lite.runtime.xla_options': ('FAST_COMPILATION_FLAG', 'compile_faster'),
  },
)
