"""llama.cpp's own towers: what it makes of pictures and sounds, through the C API of its library ``mtmd``.

llama-cpp-python's declarations (``llama_cpp.mtmd_cpp``) of that time; ``MTMD_CPP_LIB`` says where the library is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from benchmarks.peers import llama

#: Where the library is, for llama-cpp-python; it is beside llama.cpp's.
MTMD = "MTMD_CPP_LIB"
#: As the model was trained: a picture keeps its size. By default llama.cpp enlarges one to 70 tokens.
_FEWEST, _MOST = 4, 280


class Towers:
    """The towers of a GGUF file that was converted with ``--mmproj``, beside the model that ``llama.load`` loaded."""

    def __init__(self, file: Path) -> None:
        from llama_cpp import mtmd_cpp

        self.api: Any = mtmd_cpp
        settings = mtmd_cpp.mtmd_context_params_default()
        settings.use_gpu = settings.warmup = settings.print_timings = False
        settings.n_threads, settings.image_min_tokens, settings.image_max_tokens = 1, _FEWEST, _MOST
        settings.flash_attn_type = llama.api().LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = mtmd_cpp.mtmd_init_from_file(str(file).encode(), llama.model(), settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp did not load the towers in {file.name}")

    def embeddings(self, picture: Any = None, sound: Any = None) -> Any:
        """What stands for a picture (uint8 of shape (height, width, 3)) or a sound (float32 of shape (samples,)).

        Returns:
            float32 of shape (tokens, width of the model's embeddings).

        Raises:
            RuntimeError: llama.cpp refused it.
        """
        import numpy

        given = numpy.ascontiguousarray(sound if picture is None else picture)
        if picture is None:
            pointer = given.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            bitmap = self.api.mtmd_bitmap_init_from_audio(len(given), pointer)
        else:
            pointer = given.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = self.api.mtmd_bitmap_init(given.shape[1], given.shape[0], pointer)
        chunks = self.api.mtmd_input_chunks_init()
        try:
            return self._encoded(bitmap, chunks)
        finally:
            self.api.mtmd_input_chunks_free(chunks)
            self.api.mtmd_bitmap_free(bitmap)

    def _encoded(self, bitmap: Any, chunks: Any) -> Any:
        import numpy

        marker, text = self.api.mtmd_default_marker(), self.api.mtmd_input_text()
        text.text, text.text_len, text.add_special, text.parse_special = marker, len(marker), False, False
        bitmaps = (self.api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if code := self.api.mtmd_tokenize(self.context, chunks, ctypes.byref(text), bitmaps, 1):
            raise RuntimeError(f"mtmd_tokenize: {code}")
        found = [
            self.api.mtmd_input_chunks_get(chunks, index) for index in range(self.api.mtmd_input_chunks_size(chunks))
        ]
        # Beside it, the text that begins and ends it.
        (medium,) = (
            chunk
            for chunk in found
            if self.api.mtmd_input_chunk_get_type(chunk) != self.api.MTMD_INPUT_CHUNK_TYPE_TEXT
        )
        if code := self.api.mtmd_encode_chunk(self.context, medium):
            raise RuntimeError(f"mtmd_encode_chunk: {code}")
        shape = self.api.mtmd_input_chunk_get_n_tokens(medium), llama.width()
        pointer = self.api.mtmd_get_output_embd(self.context)
        return numpy.ctypeslib.as_array(pointer, (shape[0] * shape[1],)).reshape(shape).copy()
