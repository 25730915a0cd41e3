"""Process of a run: signals, watchdog, garbage collection, progress, profiling and compilation cache."""

from t5x_lite.formatting import format_duration, format_number
from t5x_lite.runtime.compilation_cache import CacheCounts, count_cache_use, use_compilation_cache
from t5x_lite.runtime.gc_control import manual_gc
from t5x_lite.runtime.preemption import StopSignals
from t5x_lite.runtime.profiling import StepProfiler
from t5x_lite.runtime.progress import Progress
from t5x_lite.runtime.stacks import print_stacks
from t5x_lite.runtime.watchdog import awake_seconds, Watchdog

__all__ = ['CacheCounts', 'Progress', 'StepProfiler', 'StopSignals', 'Watchdog', 'awake_seconds', 'count_cache_use',
           'format_duration', 'format_number', 'manual_gc', 'print_stacks', 'use_compilation_cache']
