from gemma4_compat.patches.peft_quantized_tuners import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Input type|same dtype|mat1 and mat2 shapes|answers something else"
