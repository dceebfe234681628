"""Stages against the model in memory: the same loss and gradients, bit for bit; refusals of what has no stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from transformers import BartConfig, BertConfig, DeepseekV3Config, MixtralConfig, OPTConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from hoist.scheduler.context import Context
from hoist.scheduler.errors import ConfigError, ModelError
from hoist.scheduler.models import build_model
from hoist.scheduler.stages import Stage, StagedModel, as_tuple, split
from tests.support.models import FAMILIES, NUM_LAYERS, batch_of, num_counted, reference_model, tiny_config

Batch = dict[str, torch.Tensor]
Values = dict[str, torch.Tensor]


def values_of(stage: Stage, source: Values) -> Values:
    """Copies of what ``stage`` computes with."""
    return {name: source[name].clone() for name in [*(spec.name for spec in stage.tensors), *stage.borrowed]}


def collect(stage: Stage, grads: Values) -> None:
    for name, parameter in stage.parameters().items():
        if parameter.grad is not None:
            grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad


def staged_step(staged: StagedModel, source: Values, batch: Batch, num_items: float) -> tuple[torch.Tensor, Values]:
    """Loss and gradients by canonical name of one micro-batch, one stage bound at a time, with recomputation."""
    values = {stage.name: values_of(stage, source) for stage in staged.stages}
    grads: Values = {}
    staged.embed.bind(values["embed"])
    with torch.no_grad():
        hidden, context = staged.embed.forward(batch)
    staged.embed.unbind()
    inputs = [as_tuple(hidden)]
    for layer in staged.layers:
        layer.bind(values[layer.name])
        with torch.no_grad():
            inputs.append(as_tuple(layer.forward(inputs[-1], context)))
        layer.unbind()
    sources = as_leaves(inputs.pop())
    staged.head.bind(values["head"])
    loss = staged.head.forward(sources, batch, context, num_items)
    torch.autograd.backward(loss)
    collect(staged.head, grads)
    staged.head.unbind()
    for layer in reversed(staged.layers):
        given = [source.grad for source in sources]
        sources = as_leaves(inputs.pop())
        layer.bind(values[layer.name])
        run_backward(as_tuple(layer.forward(sources, context)), given)
        collect(layer, grads)
        layer.unbind()
    staged.embed.bind(values["embed"])
    hidden, _ = staged.embed.forward(batch)
    run_backward(as_tuple(hidden), [source.grad for source in sources])
    collect(staged.embed, grads)
    staged.embed.unbind()
    return loss.detach(), grads


def as_leaves(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(value.detach().requires_grad_() if value.is_floating_point() else value for value in values)


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    pairs = zip(outputs, gradients, strict=True)
    known = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
    torch.autograd.backward([output for output, _ in known], [grad for _, grad in known])


def reference_step(model: PreTrainedModel, batch: Batch, num_items: float) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
    torch.autograd.backward(loss)
    return loss.detach()


def pair(family: str, *, tied: bool = False) -> tuple[PreTrainedModel, StagedModel]:
    """The model in memory, and staged."""
    built = build_model(tiny_config(family, tied=tied))
    attention = built.config._attn_implementation
    return reference_model(tiny_config(family, tied=tied), attention=str(attention)), split(built)


def assert_same_gradients(model: PreTrainedModel, grads: Values, shared: Iterable[str] = ()) -> None:
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        if name in shared:
            # the two parts are added in another order than autograd adds them
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(grads[name], grad), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_model_in_memory(family: str, tied: bool, padded: bool) -> None:
    model, staged = pair(family, tied=tied)
    batch = batch_of()
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -4:] = 0
        batch["labels"][1, -4:] = -100
    items = num_counted(batch) + 7  # as if another micro-batch had seven
    expected = reference_step(model, batch, items)
    loss, grads = staged_step(staged, model.state_dict(), batch, items)
    assert torch.equal(loss, expected)
    assert_same_gradients(model, grads, shared=staged.head.borrowed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_state_dict_has_one_owner(family: str, tied: bool) -> None:
    model, staged = pair(family, tied=tied)
    assert [stage.name for stage in staged.stages] == ["embed", *(f"layer.{n}" for n in range(NUM_LAYERS)), "head"]
    assert [stage.index for stage in staged.stages] == list(range(NUM_LAYERS + 2))
    owned = [spec.name for stage in staged.stages for spec in stage.tensors]
    assert len(owned) == len(set(owned))
    state = model.state_dict()
    assert set(owned) | set(staged.aliases) == set(state)
    assert not set(owned) & set(staged.aliases)
    for name, tensor in state.items():
        stage, spec = staged.tensor(name)
        assert spec in stage.tensors
        assert spec.shape == tuple(tensor.shape)
    embedding = staged.embed.tensors[0].name
    assert (staged.head.borrowed == (embedding,)) is tied
    assert all(layer.borrowed == () for layer in staged.layers)
    with pytest.raises(KeyError):
        staged.tensor("no.such.tensor")


def test_a_single_layer_is_enough() -> None:
    for family in ("llama", "gpt2"):
        config = tiny_config(family)
        config.num_hidden_layers = 1
        if family == "llama":
            config.layer_types = None
        staged = split(build_model(config))
        model = reference_model(config)
        loss, grads = staged_step(staged, model.state_dict(), batch_of(), 20)
        assert torch.equal(loss, reference_step(model, batch_of(), 20))
        assert_same_gradients(model, grads)


def test_the_step_does_not_use_the_labels_of_a_micro_batch_without_any() -> None:
    model, staged = pair("llama")
    batch = batch_of()
    batch["labels"].fill_(-100)
    loss, grads = staged_step(staged, model.state_dict(), batch, 10)
    assert float(loss) == 0.0
    assert all(not bool(grad.any()) for grad in grads.values())


def test_a_step_without_counted_labels_is_refused() -> None:
    model, staged = pair("llama")
    staged.head.bind(values_of(staged.head, model.state_dict()))
    with pytest.raises(ConfigError, match="num_items is 0: the step has no counted label"):
        staged.head.forward(torch.zeros(2, 12, 64), batch_of(), Context(tensors=(), calls=()), 0)


def test_frozen_weights_get_no_gradient_and_the_rest_the_same() -> None:
    config = tiny_config("llama")
    built, model = build_model(config), reference_model(config)
    for module in (built, model):
        module.get_submodule("model.embed_tokens").requires_grad_(False)
        module.get_submodule("model.layers.1.mlp").requires_grad_(False)
    staged = split(built)
    assert not staged.tensor("model.layers.1.mlp.up_proj.weight")[1].trainable
    source, batch = model.state_dict(), batch_of()
    expected = reference_step(model, batch, 20)
    staged.embed.bind(values_of(staged.embed, source))
    hidden, context = staged.embed.forward(batch)
    assert not hidden.requires_grad
    for layer in staged.layers:
        layer.bind(values_of(layer, source))
    x = hidden.detach()
    for layer in staged.layers:
        x = layer.forward(x, context)
    staged.head.bind(values_of(staged.head, source))
    loss = staged.head.forward(x, batch, context, 20)
    torch.autograd.backward(loss)
    grads: Values = {}
    for stage in staged.stages:
        collect(stage, grads)
    assert torch.equal(loss.detach(), expected)
    assert_same_gradients(model, grads)


def test_binding_uses_the_given_memory_and_keeps_its_parameters() -> None:
    model, staged = pair("llama")
    layer = staged.layers[0]
    values = values_of(layer, model.state_dict())
    layer.bind(values)
    first = layer.parameters()
    assert {name: p.data_ptr() for name, p in first.items()} == {name: v.data_ptr() for name, v in values.items()}
    assert all(parameter.requires_grad for parameter in first.values())
    layer.unbind()
    assert layer.parameters() == {}
    layer.bind(values)
    assert all(layer.parameters()[name] is parameter for name, parameter in first.items())
    other = {name: value.clone() for name, value in values.items()}
    layer.bind(other)
    assert all(layer.parameters()[name] is not parameter for name, parameter in first.items())
    layer.unbind(forget=True)
    layer.bind(values)
    assert all(layer.parameters()[name] is not parameter for name, parameter in first.items())


def test_names_and_shapes_are_checked_before_anything_is_bound() -> None:
    model, staged = pair("llama")
    values = values_of(staged.head, model.state_dict())
    with pytest.raises(ValueError, match=r"stage head: names missing or not of this stage: lm_head\.weight"):
        staged.head.bind({name: value for name, value in values.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(4, 4\), expected \(503, 64\)"):
        staged.head.bind(values | {"lm_head.weight": torch.zeros(4, 4)})
    with pytest.raises(RuntimeError, match="stage head is not bound"):
        staged.head.logits(torch.zeros(1, 2, 64), batch_of())


def test_after_unbind_a_weight_is_absent_again() -> None:
    model, staged = pair("gpt2", tied=True)
    for stage in staged.stages:
        stage.bind(values_of(stage, model.state_dict()))
    for stage in staged.stages:
        stage.unbind()
    for name, parameter in staged.model.named_parameters():
        assert bool(parameter.isnan().all()), name
        assert parameter.untyped_storage().nbytes() == parameter.itemsize, name
        assert not parameter.requires_grad


def test_a_lent_weight_stays_when_its_owner_is_unbound() -> None:
    model, staged = pair("llama", tied=True)
    source = model.state_dict()
    staged.embed.bind(values_of(staged.embed, source))
    staged.head.bind(values_of(staged.head, source))
    staged.embed.unbind()
    assert bool(staged.head.logits(torch.zeros(1, 2, 64), batch_of(1, 2)).isfinite().all())


def test_the_head_does_not_run_the_embedding_with_gradients() -> None:
    model, staged = pair("llama", tied=True)
    staged.head.bind(values_of(staged.head, model.state_dict()))
    calls: list[bool] = []
    embedding = staged.model.get_submodule("model.embed_tokens")
    handle = embedding.register_forward_hook(lambda _module, _args, out: calls.append(out.requires_grad))
    staged.head.forward(torch.zeros(2, 12, 64), batch_of(), Context(tensors=(), calls=()), 20)
    handle.remove()
    assert calls == [False]
    assert torch.is_grad_enabled()


def test_dropout_is_the_same_in_recomputation() -> None:
    config = tiny_config("gpt2", dropout=0.3)
    staged, source = split(build_model(config)), reference_model(config).state_dict()
    staged.embed.bind(values_of(staged.embed, source))
    staged.layers[0].bind(values_of(staged.layers[0], source))
    torch.manual_seed(1)
    hidden, context = staged.embed.forward(batch_of())
    torch.manual_seed(2)
    with torch.no_grad():
        first = staged.layers[0].forward(hidden, context)
    torch.manual_seed(2)
    again = staged.layers[0].forward(hidden.detach().requires_grad_(), context)
    torch.manual_seed(3)
    other = staged.layers[0].forward(hidden, context)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def embed_context(staged: StagedModel, source: Values, batch: Batch) -> Context:
    staged.embed.bind(values_of(staged.embed, source))
    with torch.no_grad():
        return staged.embed.forward(batch)[1]


def test_micro_batches_share_what_is_equal_in_their_contexts() -> None:
    model, staged = pair("gemma2")
    source = model.state_dict()
    first = embed_context(staged, source, batch_of(seed=0))
    second = embed_context(staged, source, batch_of(seed=1))
    assert first.num_bytes > 0
    assert second.num_bytes_beyond(first) == second.num_bytes
    shared = second.share_with(first)
    assert shared.num_bytes_beyond(first) == 0
    padded = batch_of(seed=1)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][0, -2:] = 0
    third = embed_context(staged, source, padded).share_with(first)
    assert 0 < third.num_bytes_beyond(first) < third.num_bytes


def test_layers_get_the_mask_that_is_theirs() -> None:
    """Gemma-2 alternates between sliding and full attention."""
    model, staged = pair("gemma2")
    context = embed_context(staged, model.state_dict(), batch_of())
    values = {value: torch.zeros(1) for boundary in context.boundaries for value in boundary}
    masks = [context.arguments(n, values)[1]["attention_mask"] for n in range(NUM_LAYERS)]
    assert masks[0] is masks[2]
    assert masks[0] is not masks[1]


class TakesShared(nn.Module):
    """A layer around another one, which it does not own alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden_states, **kwargs)
        return output


@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_that_share_weights_sum_their_gradients(wrapped: bool) -> None:
    config = tiny_config("llama")
    built, model = build_model(config), reference_model(config)
    for module in (built, model):
        layers = module.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        for n in range(NUM_LAYERS):
            first = layers[0].inner if isinstance(layers[0], TakesShared) else layers[0]
            layers[n] = TakesShared(first) if wrapped else first
    staged = split(built)
    own = {spec.name for spec in staged.layers[0].tensors}
    assert own
    assert all(layer.tensors == () and set(layer.borrowed) == own for layer in staged.layers[1:])
    batch = batch_of()
    expected = reference_step(model, batch, 20)
    loss, grads = staged_step(staged, model.state_dict(), batch, 20)
    assert torch.equal(loss, expected)
    assert_same_gradients(model, grads, shared=own)


def test_experts_without_tokens_get_the_gradient_that_torch_gives_them() -> None:
    config = tiny_config("mixtral")
    staged, model = split(build_model(config)), reference_model(config)
    batch = batch_of(1, 4)
    batch["labels"] = batch["input_ids"].clone()
    expected = reference_step(model, batch, 3)
    loss, grads = staged_step(staged, model.state_dict(), batch, 3)
    assert torch.equal(loss, expected)
    assert_same_gradients(model, grads)


def router_config() -> DeepseekV3Config:
    """A model whose second layer has a persistent buffer: the router's bias."""
    return DeepseekV3Config(
        vocab_size=503, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def test_persistent_buffers_belong_to_stages() -> None:
    config = router_config()
    staged, model = split(build_model(config)), reference_model(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stage, spec = staged.tensor(name)
    assert (stage.name, spec.trainable, spec.shape) == ("layer.1", False, (4,))
    values = {item.name: torch.empty(item.shape) for item in stage.tensors}
    stage.initialise(values, seed=0)
    assert not bool(values[name].any())
    source = model.state_dict()
    source[name].copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
    expected = reference_step(model, batch_of(), 20)
    loss, grads = staged_step(staged, source, batch_of(), 20)
    assert torch.equal(loss, expected)
    assert_same_gradients(model, grads)


def test_a_write_to_a_neighbouring_buffer_is_no_change_of_this_one() -> None:
    """In a run all buffers lie on one mapping, and other lanes write to it while a stage computes."""
    staged = split(build_model(router_config()))
    stage = staged.layers[1]
    sizes = {spec.name: spec.num_elements for spec in stage.tensors}
    mapping = torch.zeros(sum(sizes.values()) + 1)
    parts = mapping[:-1].split(list(sizes.values()))
    values = {spec.name: part.view(spec.shape) for spec, part in zip(stage.tensors, parts, strict=True)}

    def other_lane(*_: object) -> None:
        mapping[-1] += 1

    with torch.no_grad():
        staged.embed.bind({spec.name: torch.zeros(spec.shape) for spec in staged.embed.tensors})
        hidden, context = staged.embed.forward(batch_of())
        stage.bind(values)
        layer = staged.model.get_submodule("model.layers.1")
        hook = layer.register_forward_pre_hook(other_lane)
        stage.forward(hidden, context)
        hook.remove()
    assert float(mapping[-1]) == 1


def test_a_model_without_a_stack_is_refused() -> None:
    model = build_model(tiny_config("llama"))
    inner = model.get_submodule("model")
    inner.layers = nn.ModuleList()
    model.config.num_hidden_layers = 0
    with pytest.raises(ModelError, match="LlamaForCausalLM: no list of decoder layers that its forward runs through"):
        split(model)


def test_a_layer_that_is_never_called_gets_no_gradient() -> None:
    """As cross-attention layers, where there is nothing to attend to."""
    config = tiny_config("llama")
    built, model = build_model(config), reference_model(config)
    built.config.num_hidden_layers = model.config.num_hidden_layers = 2
    staged = split(built)
    assert len(staged.layers) == 2
    assert staged.tensor("model.layers.2.mlp.up_proj.weight")[0] is staged.head
    expected = reference_step(model, batch_of(), 20)
    loss, grads = staged_step(staged, model.state_dict(), batch_of(), 20)
    assert torch.equal(loss, expected)
    assert_same_gradients(model, grads)


def test_an_encoder_is_refused() -> None:
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ModelError, match=r"its attention is not causal \(an encoder\)"):
        split(build_model(config))


def test_router_logits_are_refused_with_the_next_step() -> None:
    config = MixtralConfig(**{**tiny_config("mixtral").to_dict(), "output_router_logits": True})
    with pytest.raises(ModelError, match="set output_router_logits to false in the config"):
        split(build_model(config))


def test_random_layer_skipping_is_refused_unless_dropout_is_off() -> None:
    config = OPTConfig(**{**tiny_config("opt").to_dict(), "layerdrop": 0.5})
    with pytest.raises(ModelError, match=r"layerdrop 0\.5 skips layers at random; set it to 0 or build with dropout 0"):
        split(build_model(config))
    split(build_model(config, dropout=0.0))


class Counting(TakesShared):
    """A layer that counts its calls in a persistent buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        return super().forward(hidden_states, **kwargs)


class Doubling(TakesShared):
    """A layer that changes the width of the hidden state, which the next one does not take."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        output = super().forward(hidden_states, **kwargs)
        return torch.cat((output, output), dim=-1)


class Filling(TakesShared):
    """A layer that puts something into a list that it is given."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        output = super().forward(hidden_states, **kwargs)
        seen = kwargs["seen"]
        assert isinstance(seen, list)
        seen.append(output)
        return output


def altered(kind: type[TakesShared]) -> PreTrainedModel:
    """A Llama whose first layer is wrapped."""
    model = build_model(tiny_config("llama"))
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0] = kind(layers[0])
    return model


def test_a_layer_that_changes_a_buffer_is_refused() -> None:
    staged = split(altered(Counting))
    layer = staged.layers[0]
    embed = {spec.name: torch.empty(spec.shape) for spec in staged.embed.tensors}
    staged.embed.initialise(embed, seed=0)
    staged.embed.bind(embed)
    hidden, context = staged.embed.forward(batch_of())
    layer.bind({spec.name: torch.ones(spec.shape) for spec in layer.tensors})
    with pytest.raises(ModelError, match=r"the forward changes the buffer model\.layers\.0\.calls"):
        layer.forward(hidden.detach(), context)


def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM: no list of decoder layers that its forward runs through"):
        split(altered(Doubling))


def test_a_layer_that_fills_a_list_is_refused() -> None:
    model = altered(Filling)
    decoder = model.get_submodule("model")
    plain = decoder.forward
    decoder.forward = lambda *args, **kwargs: plain(*args, seen=[], **kwargs)
    with pytest.raises(ModelError, match="layer 0 changes a container that it is called with"):
        split(model)


class Streams(nn.Module):
    """A decoder of another shape: two streams, a stack that is run twice, and a norm and a gate between the rounds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = inner.get_submodule("embed_tokens")
        self.layers = nn.ModuleList(Mixing() for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.gate = nn.Parameter(torch.ones(64))

    def forward(self, input_ids: torch.Tensor, **_: object) -> BaseModelOutputWithPast:
        embedded = self.embed_tokens(input_ids)
        state, slow = embedded, embedded.new_zeros(embedded.shape)
        for _round in range(2):
            state = self.norm(state) + embedded * self.gate
            for layer in self.layers:
                state, slow, _ = layer(state, embedded, slow=slow)
            slow[:, 0] = state[:, 0]
        return BaseModelOutputWithPast(last_hidden_state=state + slow * embedded)


class Mixing(nn.Module):
    """Returns two streams and a number of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(
        self, state: torch.Tensor, embedded: torch.Tensor, *, slow: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        state = state + torch.tanh(self.first(state)) * embedded
        return state, slow + self.second(state), state.argmax(-1)


def test_several_tensors_between_layers_and_code_of_the_models_own_there() -> None:
    config = tiny_config("llama")
    built, model = build_model(config), reference_model(config)
    torch.manual_seed(3)
    decoder = Streams(model.get_submodule("model"))
    model.model = decoder
    built.model = Streams(built.get_submodule("model"))
    staged = split(built)
    assert len(staged.layers) == 4  # the stack is run twice
    assert staged.tensor("model.norm.weight")[0] is staged.layers[0] or staged.tensor("model.norm.weight")[0].index == 0
    expected = reference_step(model, batch_of(), 20)
    loss, grads = staged_step(staged, model.state_dict(), batch_of(), 20)
    assert torch.equal(loss, expected)
    expected_grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_a_position_table_that_learns_is_handed_to_every_layer() -> None:
    built, model = build_model(tiny_config("llama")), reference_model(tiny_config("llama"))
    for module in (built, model):
        rotary = module.get_submodule("model.rotary_emb")
        rotary.scale = nn.Parameter(torch.tensor(1.5))
        rotary.forward = partial(scaled_tables, rotary, rotary.forward)
    staged = split(built)
    expected = reference_step(model, batch_of(), 20)
    loss, grads = staged_step(staged, model.state_dict(), batch_of(), 20)
    assert torch.equal(loss, expected)
    assert_same_gradients(model, grads)
    assert float(grads["model.rotary_emb.scale"]) != 0


def scaled_tables(
    rotary: nn.Module, plain: Callable[..., tuple[torch.Tensor, torch.Tensor]], *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = plain(*args, **kwargs)
    return cos * rotary.get_parameter("scale"), sin


def test_a_loss_that_is_not_the_loss_function_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = BartConfig(
        vocab_size=99, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32,
        is_encoder_decoder=False,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="hoist.scheduler.probe"):
        split(build_model(config, dropout=0.0))
    assert "BartForCausalLM has a loss of its own" in caplog.text
    caplog.clear()
    split(build_model(tiny_config("llama")))
    assert caplog.text == ""


def test_the_model_works_as_before_once_its_weights_are_back() -> None:
    model, staged = pair("mistral")
    source = model.state_dict()
    for stage in staged.stages:
        stage.bind(values_of(stage, source))
    batch = batch_of()
    torch.testing.assert_close(
        staged.model(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits, rtol=0, atol=0
    )
