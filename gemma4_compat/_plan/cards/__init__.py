"""Cards on which people measured: :mod:`measured` reads their files, :mod:`card_report` is the form of one."""

from __future__ import annotations
