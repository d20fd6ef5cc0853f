# SPDX-License-Identifier: Apache-2.0
"""A module that a zygote preloads, and that registers ends which are the zygote's alone."""

import atexit
import weakref

atexit.register(print, "atexit of the zygote")
weakref.finalize(atexit.register, print, "finalizer of the zygote")
