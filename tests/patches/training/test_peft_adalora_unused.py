from gemma4_compat.patches.training.peft_adalora_unused import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"unsupported operand type"
