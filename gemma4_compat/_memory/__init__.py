"""How many bytes a forward needs, and where the parts of a model go so that it fits.

Called while ``generate`` reads prompts (``_generation/prompts/chunks.py``), by ``device_map="auto"``
(``patches/placement/transformers_auto_map.py``), and by plans (``_plan``).

* :mod:`blueprint`: a model's blocks and their bytes. :mod:`upstream`: what differs between releases.
* :mod:`formulas`: the KV cache and a forward's temporaries.
* :mod:`use`: the sum for one accelerator; ``Use.peak`` is a plan's peak. :mod:`layout`: which block goes where.
"""
