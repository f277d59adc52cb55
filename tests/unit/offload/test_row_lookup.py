"""Gathering the rows of a weight, and the lookup of one embedding in both ways."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import row_lookup
from gemma4_compat._offload.transfer.row_lookup import Lookup
from gemma4_compat.patches.offload.accelerate_embedding_lookup import largest_tensor

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("accelerate", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

WAYS = ["in place", "rows"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the CPU an embedding is looked up in place; *rows* is forced."""
    if request.param == "rows":
        monkeypatch.setattr(Lookup, "in_place", False)
    return str(request.param)


def offloaded(embedding: Any) -> tuple[Any, Any]:
    """The embedding on the host, computing on the CPU, and its hook."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    hook = AlignDevicesHook(execution_device=torch.device("cpu"), offload=True)
    return add_hook_to_module(embedding, hook), hook


def embedding(rows: int = 50, width: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    module = torch.nn.Embedding(rows, width, **options).eval()
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "tokens",
    [[[3, 3, 3, 49]], [[0]], [[49, 0], [7, 7]], [], [[]], 5, [[[1, 2], [2, 1]]], list(range(49, -1, -1))],
    ids=str,
)
def test_gathered_rows_and_numbers_give_the_rows_of_the_tokens(tokens: Any, dtype: Any) -> None:
    weight = torch.randn(50, 4, dtype=torch.bfloat16)
    ids = torch.tensor(tokens, dtype=dtype)
    rows, renumbered = row_lookup.gather(weight, ids, torch.device("cpu"))
    assert renumbered.dtype == ids.dtype
    assert renumbered.shape == ids.shape
    assert rows.dtype == weight.dtype
    assert rows.shape == (len(set(ids.flatten().tolist())), 4)
    assert torch.equal(torch.nn.functional.embedding(renumbered, rows), torch.nn.functional.embedding(ids, weight))


@pytest.mark.parametrize("wrong", [50, -1])
def test_a_token_without_a_row_is_an_index_error(wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        row_lookup.gather(torch.randn(50, 4), torch.tensor([[1, wrong]]), "cpu")


def test_gathered_rows_of_a_parameter_have_no_history() -> None:
    rows, _ = row_lookup.gather(torch.nn.Parameter(torch.randn(50, 4)), torch.tensor([1]), "cpu")
    assert not rows.requires_grad


@pytest.mark.parametrize("padding", [None, 0, 49])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_offloaded_embedding_gives_its_rows(way: str, dtype: Any, padding: int | None) -> None:
    ids = torch.tensor([[3, 49, 3, 0], [0, 0, 49, 7]], dtype=dtype)
    reference = embedding(padding_idx=padding)(ids)
    module, hook = offloaded(embedding(padding_idx=padding))
    for _ in range(3):
        assert torch.equal(module(ids), reference)
        assert torch.equal(module(input=ids), reference)
        assert module.weight.device.type == "meta"
        assert module.padding_idx == padding
    assert row_lookup.current(hook) is None
    assert module(ids[:, :0]).shape == (2, 0, 4)


def test_nothing_larger_than_the_rows_is_created(way: str) -> None:
    module, _ = offloaded(embedding(1000))
    assert largest_tensor(lambda: module(torch.tensor([[3, 3, 5, 999]]))) <= 16


def test_a_failed_forward_leaves_the_next_one_right(way: str) -> None:
    module, hook = offloaded(embedding(padding_idx=49))
    ids = torch.tensor([[3, 49]])
    reference = embedding(padding_idx=49)(ids)

    forward = module._old_forward
    failing = lambda ids: forward(ids) + torch.ones(7)  # noqa: E731
    failing.__func__ = torch.nn.Embedding.forward  # type: ignore[attr-defined]
    module._old_forward = failing
    with pytest.raises(RuntimeError, match="size of tensor"):
        module(ids)
    module._old_forward = forward
    assert row_lookup.current(hook) is not None
    assert torch.equal(module(ids), reference)
    assert module.padding_idx == 49
    assert module.weight.device.type == "meta"


def test_after_a_failed_forward_the_whole_weight_can_be_onloaded(way: str) -> None:
    from accelerate.utils import align_module_device

    module, hook = offloaded(embedding(padding_idx=49))
    lookup = row_lookup.lookup_for(hook, module)
    assert lookup is not None
    lookup.enter(module, torch.tensor([[3, 49]]))
    with align_module_device(module, "cpu"):
        assert torch.equal(module.weight, embedding(padding_idx=49).weight)
    assert module.padding_idx == 49


def test_positions_computed_from_the_argument_are_not_taken_for_tokens(way: str) -> None:
    class Positions(torch.nn.Embedding):  # type: ignore[misc, name-defined]
        def forward(self, mask: Any) -> Any:
            return super().forward(mask.cumsum(1) * mask)

    def make() -> Any:
        torch.manual_seed(0)
        return Positions(50, 4).eval().requires_grad_(False)

    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    module, _ = offloaded(make())
    assert torch.equal(module(mask), make()(mask))
    assert module.weight.device.type == "meta"


def test_an_embedding_that_renormalizes_its_rows(way: str) -> None:
    ids = torch.tensor([[3, 49, 3, 0]])
    module, hook = offloaded(embedding(max_norm=0.5))
    whole = embedding(max_norm=0.5)
    for _ in range(2):
        assert torch.equal(module(ids), whole(ids))
    assert row_lookup.lookup_for(hook, module) is None


def test_a_trained_weight_is_onloaded_also_after_it_was_looked_up(way: str) -> None:
    ids = torch.tensor([[3, 49, 3, 0]])
    module, hook = offloaded(embedding())
    reference = module(ids)
    module.weight.requires_grad_(True)
    module.train()
    seen = []
    module.register_forward_pre_hook(lambda *_: None)
    forward = module._old_forward

    def watch(tokens: Any) -> Any:
        seen.append(row_lookup.current(hook))
        return forward(tokens)

    module._old_forward = watch
    output = module(ids)
    assert output.requires_grad
    assert torch.equal(output, reference)
    assert seen == [None]
    with torch.no_grad():
        assert torch.equal(module(ids), reference)
    assert module.weight.device.type == "meta"
    assert module.weight.requires_grad


def test_gradients_of_the_embeddings_in_eval_mode(way: str) -> None:
    ids = torch.tensor([[3, 49, 3, 0]])
    found = []
    for module in (embedding(), offloaded(embedding())[0]):
        module.weight.requires_grad_(True)
        rows = module(ids)
        rows.retain_grad()
        (rows * torch.arange(16.0).reshape(1, 4, 4)).sum().backward()
        found.append(rows.grad)
    assert torch.equal(*found)


def test_created_in_inference_mode_it_serves_a_training(way: str) -> None:
    ids = torch.tensor([[3, 49, 3, 0]])
    module, _ = offloaded(embedding())
    with torch.inference_mode():
        reference = module(ids)
    factor = torch.ones(4, requires_grad=True)
    (module(ids) * factor).sum().backward()
    assert torch.equal(factor.grad, reference.clone().sum((0, 1)))
    module.weight.requires_grad_(True)
    assert module(ids).requires_grad


def test_a_weight_of_another_class_is_left_to_upstream() -> None:
    class Quantized(torch.nn.Parameter):  # type: ignore[misc, name-defined]
        pass

    module, hook = offloaded(embedding())
    module._parameters["weight"] = Quantized(module.weight, requires_grad=False)
    assert row_lookup.lookup_for(hook, module) is None


def test_a_module_with_more_to_onload_is_left_to_upstream() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    class Normed(torch.nn.Embedding):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(50, 4)
            self.norm = torch.nn.LayerNorm(4)
            self.register_buffer("scale", torch.full((4,), 3.0))

        def forward(self, ids: Any) -> Any:
            return self.norm(super().forward(ids)) * self.scale

    torch.manual_seed(0)
    whole = Normed().eval().requires_grad_(False)
    for options in ({"place_submodules": True}, {"offload_buffers": True, "place_submodules": True}):
        hook = AlignDevicesHook(execution_device=torch.device("cpu"), offload=True, **options)
        module = add_hook_to_module(copy.deepcopy(whole), hook)
        ids = torch.tensor([[3, 49]])
        assert torch.equal(module(ids), whole(ids))
        assert row_lookup.lookup_for(hook, module) is None


def test_where_it_computes_may_change(way: str) -> None:
    """``save_pretrained`` has the weights of every hook brought to the CPU, wherever it computes."""
    from accelerate.utils import align_module_device

    ids = torch.tensor([[3, 49]])
    module, hook = offloaded(embedding())
    reference = module(ids)
    with align_module_device(module, "meta"):
        assert module.weight.device.type == "meta"
    assert torch.equal(module(ids), reference)
    hook.execution_device = torch.device("meta")
    elsewhere = row_lookup.lookup_for(hook, module)
    assert elsewhere is not None
    hook.execution_device = torch.device("cpu")
    assert row_lookup.lookup_for(hook, module) is not elsewhere
    with align_module_device(module, "cpu"), align_module_device(module, "cpu"):
        assert torch.equal(module.weight, embedding().weight)
    assert torch.equal(module(ids), reference)


def test_upstreams_hook_within_ours_and_ours_within_upstreams(way: str) -> None:
    module, hook = offloaded(embedding())
    hook.pre_forward(module)
    hook.pre_forward(module)
    hook.post_forward(module, None)
    hook.post_forward(module, None)
    assert module.weight.device.type == "meta"
    assert torch.equal(module(torch.tensor([1])), embedding()(torch.tensor([1])))


def test_hooks_in_a_sequence(way: str) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    module, hook = offloaded(embedding())
    add_hook_to_module(module, ModelHook(), append=True)
    ids = torch.tensor([[3, 49]])
    assert torch.equal(module(ids), embedding()(ids))
    assert vars(hook)[row_lookup._STATE].meta is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_creates_its_own(copied: Callable[[Any], Any]) -> None:
    module, hook = offloaded(embedding())
    lookup = row_lookup.lookup_for(hook, module)
    assert lookup is not None
    assert copied({"lookup": lookup}) == {"lookup": None}


def test_a_weight_that_a_file_holds_in_another_dtype_is_not_converted_as_a_whole(tmp_path: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import OffloadedWeightsLoader
    from safetensors.torch import save_file

    whole = embedding(1000).float()
    file = str(tmp_path / "model.safetensors")
    save_file({"weight": whole.weight.data}, file)
    entry = {"safetensors_file": file, "weight_name": "weight", "dtype": "bfloat16"}
    hook = AlignDevicesHook(
        execution_device=torch.device("cpu"), offload=True, weights_map=OffloadedWeightsLoader(index={"weight": entry})
    )
    module = add_hook_to_module(copy.deepcopy(whole).bfloat16(), hook)
    ids = torch.tensor([[3, 999, 3]])
    output = module(ids)
    assert largest_tensor(lambda: module(ids)) <= 12
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, whole.bfloat16()(ids))


class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An embedding, and the head that is tied to it."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(*weight.shape), torch.nn.Linear(*weight.shape[::-1], bias=False)
        self.embed.weight = self.head.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.norm = torch.nn.LayerNorm(weight.shape[1])


def tied(weight: Any, where: str = "cpu", **options: Any) -> Any:
    """Both of them on the host, computing on the CPU."""
    from accelerate import dispatch_model

    main = torch.device("cpu")
    placement = {"embed": where, "head": where, "norm": main}
    return dispatch_model(Tied(weight), placement, main_device=main, **options)


def in_place(model: Any) -> bool:
    """Whether the last forward of the head read its weight in place."""
    return row_lookup.known(module_hooks.offload_hook(model.head)) is not None


def states(rows: int) -> Any:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


def test_a_tied_head_computes_few_rows_in_place() -> None:
    weight = torch.randn(600, 16)
    model, linear = tied(weight.clone()), torch.nn.functional.linear
    meta = model.head.weight
    for rows, expected in ((1, True), (row_lookup.MOST_ROWS, True), (row_lookup.MOST_ROWS + 1, False), (2, True)):
        given = states(rows)
        with torch.no_grad():
            assert torch.equal(model.head(given), linear(given, weight))
            assert torch.equal(model.head(input=given), linear(given, weight))
        assert in_place(model) == expected
        assert model.head.weight is meta  # else graphs would be captured anew
    model.head(states(1))
    assert not in_place(model)  # a backward pass might follow
    with torch.no_grad():
        where = host_memory.stored(module_hooks.offload_hook(model.head).weights_map, "weight")
        where.raw.mul_(2)
        assert torch.equal(model.head(states(1)), linear(states(1), 2 * weight))
        where.holder[where.key] = weight * 3
        assert torch.equal(model.head(states(1)), linear(states(1), 3 * weight))


def test_heads_that_are_copied(tmp_path: Any) -> None:
    """Also by who onloads one by itself, as the loss in chunks does."""
    model, weight = tied(torch.randn(600, 16)), torch.randn(600, 16)
    hook = module_hooks.offload_hook(model.head)
    hook.pre_forward(model.head)
    assert not in_place(model)
    assert model.head.weight.device.type == "cpu"
    hook.post_forward(model.head, None)
    untied = torch.nn.Linear(16, 600, bias=False)
    untied, own = offloaded(untied)
    on_disk = tied(weight, "disk", offload_dir=tmp_path)
    cast = tied(weight).half()
    with torch.no_grad():
        untied(states(1))
        assert row_lookup.known(own) is None
        for one in (on_disk, cast):
            given = states(1).to(one.head.weight.dtype)
            expected = torch.nn.functional.linear(given, weight.to(given.dtype))
            assert torch.equal(one.head(given), expected)
            assert not in_place(one)


def test_a_weight_that_a_file_has_not_aligned_moves_with_what_is_tied_to_it() -> None:
    memory = torch.zeros(600 * 16 + 1)
    weight = memory[1:].view(600, 16).normal_()
    assert weight.data_ptr() % 16
    model, given = tied(weight), states(3)
    with torch.no_grad():
        assert torch.equal(model.embed(torch.tensor([5])), weight[5:6])
        assert torch.equal(model.head(given), torch.nn.functional.linear(given, weight))
    assert in_place(model)
    first, second = (
        host_memory.stored(module_hooks.offload_hook(one).weights_map, "weight").raw
        for one in (model.embed, model.head)
    )
    assert first is second
    assert weight.data_ptr() not in module_hooks.offload_hook(model.head).tied_params_map
    assert not first.data_ptr() % 16
