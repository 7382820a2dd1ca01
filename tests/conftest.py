"""One compilation cache for the whole session, its subprocesses included."""

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix='planpo-xla-')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.5'
