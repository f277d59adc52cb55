"""Objects and threads of this process.

* :mod:`in_place`: a method, an attribute or a variable replaced. :mod:`proxies`, :mod:`views`: an object seen
  otherwise.
* :mod:`locks`: who waits for whom. :mod:`selftest`: what is tried once on a device. :mod:`host_copy`: values on their
  way from there.
"""

from __future__ import annotations
