"""What each connection does in each decoder of Transformers: passes, or is refused with a reason.

python tests/any_decoder.py llama gemma3_text     # these
python tests/any_decoder.py                       # all: rewrites docs/any-decoder.md's table and modeling/measured.py
"""

import copy
import functools
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from small_decoders import TYPES, VOCABULARY, small_decoder
from transformers import AttentionMaskInterface, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import resformer
from resformer.configuration.methods import METHODS
from resformer.modeling.any_decoder import Decoder
from resformer.modeling.connected import added_modules
from resformer.modeling.connecting import chosen_fields, connected_config
from resformer.modeling.connection import coefficient
from resformer.modeling.versions import CACHE
from resformer.training.optimizer import is_connection

#: Column -> the fields of the connection; those that `connect` starts plainly, but for NeuTRENO.
CONNECTIONS: dict[str, dict[str, Any]] = {
    "value_residual": {"value_residual": "learnable"},
    "neutreno": {"neutreno_lambda": 0.4},
    "value_embeddings": {"value_embeddings": [0, 1, 2, 3]},
    "depth_attention": {"value_residual": "depth_attention"},
    "dwa": {"dwa": True},
    "embedding_residual": {"embedding_residual": True},
    "backout": {"backout": True, "backout_init": 0.0},
    "delta_attention_residuals": {"delta_attention_residuals": True, "delta_attention_residual_blocks": 2},
    "attnres": {"attnres": True, "attnres_blocks": 2, "attnres_init": 0.0},
    "mudd": {"mudd": True},
    "mudd-r": {"mudd": True, "mudd_channels": "r"},
    "hyper_connections": {"hyper_connections": "mhc"},
    "sharing": {},  # of `sharing`
    "own": {"connections": {"seen_gain": {"init": 1.0}}},
}
#: Those with which a model is tried at once: each is in one of them. It is saved and loaded with all.
SETS = (
    ("value_residual", "neutreno", "value_embeddings", "dwa", "embedding_residual", "backout", "own"),
    ("depth_attention", "delta_attention_residuals", "attnres"),
    ("mudd",),
    ("mudd-r", "hyper_connections"),
)
IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


class Gained(resformer.Connection):
    """x <- x + c g f: what attention adds, times g and c."""

    name, place, plain = "seen_gain", "attention_added", {"init": 1.0}
    init: float = 0.5
    times: float = 1.0

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.weight = coefficient(1)

    def forward(self, added: torch.Tensor) -> torch.Tensor:
        return added * self.weight.to(added.dtype) * self.times

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, self.init)


def sharing(model: PreTrainedModel) -> dict[str, Any]:
    """Pairs of layers, each of one kind."""
    return chosen_fields(model.config, "cla2", {})


def with_values(model: PreTrainedModel) -> list[int]:
    return [n for n, places in enumerate(Decoder(model).places) if places.values is not None]


def fields_for(base: PreTrainedModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The same, with the layers of this model; raises `ValueError` if none are there to share."""
    if "value_embeddings" in fields:
        fields = fields | {"value_embeddings": with_values(base)[-2:] or [0]}
    return fields or sharing(base)


def connected(base: PreTrainedModel, fields: dict[str, Any]) -> PreTrainedModel:
    """A copy with connections; raises `ValueError` with the reason if it is refused."""
    return resformer.connect(copy.deepcopy(base), "transformer", lossy=True, **fields_for(base, fields))


def move(model: PreTrainedModel, of: str = "") -> None:
    """Coefficients that do something: all, or those of the modules of this name."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if is_connection(name) and of in ("", *name.split(".")):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS).logits


def tokens_of(model: PreTrainedModel, *, use_cache: bool) -> torch.Tensor:
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=use_cache, **options)


@torch.no_grad()
def caches_agree(model: PreTrainedModel) -> bool:
    """Whether four tokens, given so that a tie between two leads nowhere else, have the logits of one pass over all."""
    given = torch.randint(3, VOCABULARY, (4,), generator=torch.Generator().manual_seed(2))
    output = model.generate(
        input_ids=IDS,
        attention_mask=torch.ones_like(IDS),
        use_cache=True,
        max_new_tokens=len(given),
        do_sample=False,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, ids: given[len(ids) - IDS.shape[1] :][:1].tolist(),
        output_logits=True,
        return_dict_in_generate=True,
    )
    cached, whole = torch.stack(output.logits, dim=1), torch.cat([IDS, given.expand(len(IDS), -1)], dim=1)
    expected = model(input_ids=whole, use_cache=False).logits[:, -5:-1].float()  # as `generate` gives them
    if torch.allclose(cached, expected, atol=1e-5):
        return True
    return model.dtype == torch.float32 and caches_agree(in_float64(model))


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy, in which what is rounding alone is not there."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # others have no products in float64
    return exact


def facts_of(model: PreTrainedModel) -> tuple[torch.Tensor, type, dict[str, Any], list[type]]:
    """The logits, the type of what a hook on a layer sees, the configuration, and all classes."""
    seen: list[type] = []
    handle = Decoder(model).layers[0].register_forward_hook(lambda _module, _args, output: seen.append(type(output)))
    logits = logits_of(model)
    handle.remove()
    return logits, seen[0], model.config.to_dict(), [type(each) for each in (model.config, *model.modules())]


@functools.lru_cache(maxsize=1)
def plain_facts(base: PreTrainedModel) -> tuple[Any, ...]:
    """What each connection is compared with, from before the first."""
    return facts_of(base)


@functools.lru_cache(maxsize=1)
def generates(base: PreTrainedModel) -> bool:
    """Whether the family itself generates, with a cache what it does without."""
    try:
        return base.can_generate() and caches_agree(base)
    except Exception:  # any of a family's code
        return False


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Of the coefficients."""
    return {name: gradient for name, gradient in all_gradients(model, [IDS]).items() if is_connection(name)}


def all_gradients(
    model: PreTrainedModel, texts: Sequence[torch.Tensor] = (IDS, IDS.flip(1))
) -> dict[str, torch.Tensor]:
    """Of passes that are alive at once."""
    model.zero_grad()
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in texts]
    sum(losses).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class SeenValues(resformer.Connection):
    """Keeps the values that a layer caches."""

    name, place, by_heads, plain = "seen_values", "mixed_values", True, {}
    kept: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.layer = layer

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.kept[self.layer] = values
        return values

    @classmethod
    def layers(cls, config: Any) -> list[int]:
        return [n for n, group in enumerate(config.value_groups) if group is not None]


def assert_values_are_those_that_are_attended_to(base: PreTrainedModel, fields: dict[str, Any]) -> None:
    """What is taken for values is what the attention gets, where it goes through Transformers' interface."""
    model = connected(base, fields | {"connections": {"seen_values": {}}})
    move(model)
    attended: dict[int, torch.Tensor] = {}

    def spy(module: Any, query: Any, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(module, "lambda_init"):  # which attends to each half of the values by itself
            attended[module.layer_idx] = value / getattr(module, "v_scale", 1.0)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    SeenValues.kept.clear()
    try:
        ALL_ATTENTION_FUNCTIONS.register("spy", spy)
        model.set_attn_implementation("spy")
        logits_of(model)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError):
        return
    for key in SeenValues.kept.keys() & attended.keys():
        ours, theirs = SeenValues.kept[key], attended[key].transpose(1, 2)
        if ours.shape[2] != theirs.shape[2]:
            ours = ours.repeat_interleave(theirs.shape[2] // ours.shape[2], dim=2)
        assert torch.allclose(ours, theirs[..., : ours.shape[-1]], atol=1e-6), "values are not what is attended to"


class SeenStream(resformer.Connection):
    """Keeps what a layer reads, adds and returns."""

    at, plain = "", {}
    kept: ClassVar[dict[tuple[str, int], torch.Tensor]] = {}

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.kept[self.at, self.layer] = states
        return states


SEEN_STREAM = ("layer_input", "attention_added", "mlp_added", "layer_output")
for _n, _place in enumerate(SEEN_STREAM):
    type(_place, (SeenStream,), {"name": f"seen_{_n}", "place": _place, "at": _place, "__module__": __name__})


def assert_what_is_added_is_what_sublayers_add(base: PreTrainedModel) -> None:
    """`attention_added` and `mlp_added` add up to what a layer adds to the stream, where the decoder has them."""
    model = connected(base, {"connections": {f"seen_{n}": {} for n, _ in enumerate(SEEN_STREAM)}})
    SeenStream.kept.clear()
    logits_of(model)
    layers = {n for _, n in SeenStream.kept}
    assert layers, "no layer has come by its places"
    for n in layers:
        before, attention, mlp, after = (SeenStream.kept[place, n] for place in SEEN_STREAM)
        total = before + attention.reshape(before.shape) + mlp.reshape(before.shape)
        assert torch.allclose(total, after, rtol=1e-4, atol=1e-5), "what is added to the stream is something else"


def assert_the_first_norm_comes_before_attention(base: PreTrainedModel) -> None:
    decoder = Decoder(base)
    n = next((n for n in range(decoder.count) if decoder.places[n].attention), None)
    if n is None:
        return
    layer, places = decoder.layers[n], decoder.places[n]
    ran: list[str] = []
    names = (places.norms[0], places.attention)
    hooks = [layer.get_submodule(n).register_forward_pre_hook(lambda *_, n=n: ran.append(n)) for n in names]
    logits_of(base)
    for hook in hooks:
        hook.remove()
    assert ran[0] == names[0], "its norms come after what they are taken to be before"


def attending_as_shared(base: PreTrainedModel, model: PreTrainedModel) -> torch.Tensor | None:
    """The logits of the plain model, whose attention gets the keys and values of other layers from here."""
    keys, values = model.config.key_sources, model.config.value_sources
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        n = module.layer_idx
        made[n] = key, value
        key, value = made[keys[n]][0], made[values[n]][1]
        return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, *args, **kwargs)

    plain = copy.deepcopy(base)
    ALL_ATTENTION_FUNCTIONS.register("as_shared", attention)
    AttentionMaskInterface.register("as_shared", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        plain.set_attn_implementation("as_shared")
        expected = plain(input_ids=IDS, use_cache=False).logits
    except (ValueError, KeyError, ImportError, AttributeError, TypeError):
        return None
    model.set_attn_implementation("eager")
    return expected if made else None


@torch.no_grad()
def verdict_on_sharing(base: PreTrainedModel, model: PreTrainedModel) -> str:
    if (expected := attending_as_shared(base, model)) is not None:
        assert torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-5), "it attends to something else"
        model.set_attn_implementation(base.config._attn_implementation)
    assert not generates(base) or caches_agree(model), "a cache changes logits"
    if generates(base):
        held = [held_bytes(each, use_cache=True) for each in (model, base)]
        layers = len(model.config.key_sources)
        distinct = (len({*model.config.key_sources}) + len({*model.config.value_sources})) / (2 * layers)
        assert held[0] is None or distinct == 1 or held[0] < held[1], "the cache is not smaller"
    assert_reloads(model)
    return ""


def held_bytes(model: PreTrainedModel, **options: Any) -> int | None:
    """Bytes of keys and values of a cache."""
    output = model(input_ids=IDS, **options)
    cache = getattr(output, CACHE, None)
    if not hasattr(cache, "layers"):
        return None
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def why_refused(base: PreTrainedModel, name: str) -> str:
    """Empty if it is not."""
    try:
        Decoder(base).view(connected_config(base.config, "transformer", **fields_for(base, CONNECTIONS[name])))
    except ValueError as error:
        return str(error).partition(": ")[2] or str(error)
    return ""


def verdict(base: PreTrainedModel, name: str, alone: bool = True) -> str:
    """Empty if the connection passes everything; else why it is refused. Where it raises, `base` stays connected.

    What is not tried alone is tried in `SETS`; NeuTRENO is, for no model starts with it as it was.
    """
    if said := why_refused(base, name):
        return said
    if name == "sharing":
        return verdict_on_sharing(base, connected(base, {}))
    if name == "own":
        assert_what_is_added_is_what_sublayers_add(base)
    if name in ("delta_attention_residuals", "attnres", "mudd"):
        assert_the_first_norm_comes_before_attention(base)
    if "value" in name:
        assert_values_are_those_that_are_attended_to(base, CONNECTIONS[name])
    if alone or name == "neutreno":
        assert_it_comes_and_goes(base, [name])
    return ""


def fields_of(names: Sequence[str]) -> dict[str, Any]:
    return {name: value for each in reversed(names) for name, value in CONNECTIONS[each].items()}


def assert_it_comes_and_goes(base: PreTrainedModel, names: Sequence[str]) -> None:
    """Connections start plainly, each does something once it has learned, and without them the model is as before."""
    expected, seen, *rest = plain_facts(base)
    model = resformer.connect(base, "transformer", lossy=True, **fields_for(base, fields_of(names)))
    logits, seen_now, *_ = facts_of(model)
    assert seen_now is seen, "a hook on a layer sees something else"
    assert torch.equal(logits, expected) != (names == ["neutreno"]), "the plain start changes logits, or NeuTRENO none"
    learning = [name.rpartition(".")[2] for name, each in added_modules(model).items() if [*each.parameters()]]
    for part in dict.fromkeys(learning):
        move(model, part)
        before, logits = logits, logits_of(model)
        assert not torch.equal(logits, before), f"{part} has no effect"
    logits, *rest_now = facts_of(resformer.disconnect(model, lossy=True))
    assert rest_now == [seen, *rest], "disconnected, it is another model"
    assert torch.equal(logits, expected), "disconnected, it computes something else"


def together(base: PreTrainedModel, names: Sequence[str]) -> PreTrainedModel:
    model = connected(base, fields_of(names))
    move(model)
    return model


def assert_it_generates_and_trains(model: PreTrainedModel, generating: bool) -> None:
    """A cache changes no logits; each coefficient has a gradient, and the same one with checkpoints."""
    assert not generating or caches_agree(model), "a cache changes logits"
    found = gradients(model.train())
    added = {each for each, _ in model.named_parameters() if is_connection(each)}
    assert found.keys() == added, "a coefficient has no gradient"
    assert all(gradient.isfinite().all() for gradient in found.values()), "a gradient is not finite"
    dropout = any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())
    if model.supports_gradient_checkpointing and not dropout:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = gradients(model)
        model.gradient_checkpointing_disable()
        assert all(torch.allclose(again[each], found[each], atol=1e-6) for each in found), (
            "checkpointing changes gradients"
        )


@torch.no_grad()
def assert_same(loaded: PreTrainedModel, model: PreTrainedModel, **inputs: torch.Tensor) -> None:
    """Tensors to the bit, and logits but for the last: products depend on where tensors lie in memory."""
    state, inputs = model.state_dict(), inputs or {"input_ids": IDS}
    assert all(torch.equal(each, state[name]) for name, each in loaded.state_dict().items()), "saving changes tensors"
    if not torch.allclose(*(each(**inputs).logits for each in (loaded, model)), atol=1e-6):
        exactly = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        exact = [in_float64(each)(**exactly).logits for each in (loaded, model)]
        assert torch.allclose(*exact, rtol=0, atol=1e-12), "saving and loading changes logits"


def assert_reloads(model: PreTrainedModel) -> None:
    """It is saved and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        known = (
            auto
            for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
            if type(model.config) in auto._model_mapping
        )
        load = next(known, type(model))  # the latter of a text decoder of something larger
        loaded, info = load.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(model), "it is loaded as something else"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        "loading misses tensors"
    )
    assert_same(loaded, model)


def verdicts(model_type: str, alone: bool = True) -> dict[str, str]:
    """Of each connection, alone or in `SETS`; one entry, `""`, if no small model is made that reads text."""
    base = None
    try:
        base = small_decoder(model_type)
        logits_of(base)
    except Exception as error:  # any of a family's code
        print(f"{model_type}: {type(error).__name__}: {error}", file=sys.stderr)
        return {"": "no small model of it is made" if base is None else "a small model of it does not read text alone"}
    found = {}
    for name in CONNECTIONS:
        try:
            found[name] = verdict(base, name, alone)
        except Exception as error:
            found[name] = f"FAILS: {type(error).__name__}: {error}"[:300]
            base = small_decoder(model_type)
    for names in (*SETS, tuple(CONNECTIONS)):
        passing = [name for name in names if not found[name] and CONNECTIONS[name]]
        if not passing:
            continue
        try:
            if names in SETS and not alone and (plainly := [name for name in passing if name != "neutreno"]):
                assert_it_comes_and_goes(base, plainly)
            model = together(base, passing)
            if names in SETS:
                assert_it_generates_and_trains(model, generates(base))
            else:
                assert_reloads(model)
        except Exception as error:
            base = small_decoder(model_type)
            try:
                assert_reloads(base)
            except Exception:  # any of a family's code
                return {"": "the model without connections is not loaded as it was saved"}
            found |= dict.fromkeys(passing, f"FAILS together: {type(error).__name__}: {error}"[:300])
    return found


for _name in [*METHODS]:  # these classes are no methods that other tests walk
    if _name.startswith("seen_"):
        del METHODS[_name]

ROOT = Path(__file__).parents[1]
PAGE, LIST = ROOT / "docs/any-decoder.md", ROOT / "modeling/measured.py"
BEGIN, END = "<!-- python tests/any_decoder.py -->\n", "<!-- end -->\n"
ALL = "all"


def refusals(of_type: dict[str, str]) -> dict[str, list[str]]:
    """Reason -> the connections that are refused for it."""
    reasons: dict[str, list[str]] = {}
    for name, said in of_type.items():
        if said:
            said = re.sub(r"\b[Ii]n layer \d+ |\b(in|of) \w+(Layer|Block)\b|\(\d+\) ", "", said)
            said = re.sub(r"\blayer \d+ ", "a layer ", said).replace(" .", ".").replace("|", "/")
            reasons.setdefault(said, []).append(name)
    return reasons


def refused(reasons: dict[str, list[str]]) -> set[str]:
    """The connections in `refusals`."""
    return {name for names in reasons.values() for name in names}


def documented() -> dict[str, dict[str, list[str]]]:
    """Model type -> its `refusals` in docs/any-decoder.md."""
    table, _, below = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].partition("\n\n")
    why = dict(re.findall(r"^(\d+)\. (.*)$", below, re.MULTILINE))
    found = {}
    for types, cell in re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE):
        reasons = {
            why[number]: [*CONNECTIONS] if names == ALL else names.split(", ")
            for names, number in re.findall(r"([^;]+) \((\d+)\)(?:; )?", cell)
        }
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", types), reasons)
    return found


def written(found: dict[str, dict[str, list[str]]]) -> str:
    """The table: model types with the same `refusals` in a row, reasons as the numbers of the list below it."""
    numbers: dict[str, int] = {}
    types: dict[str, list[str]] = {}
    for model_type, reasons in sorted(found.items()):
        cells = [
            f"{ALL if names == [*CONNECTIONS] else ', '.join(names)} ({numbers.setdefault(why, len(numbers) + 1)})"
            for why, names in reasons.items()
        ]
        types.setdefault("; ".join(cells) or "none", []).append(f"`{model_type}`")
    lines = ["| model types | refused |", "|---|---|", *(f"| {', '.join(of)} | {cell} |" for cell, of in types.items())]
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in numbers.items()), ""])


def write(found: dict[str, dict[str, str]]) -> None:
    """Writes the table, and the types of which a small model could be made."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table = written({model_type: refusals(of_type) for model_type, of_type in found.items() if "" not in of_type})
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    names = sorted(name for name, of_type in found.items() if "" not in of_type)
    listed = textwrap.fill(
        " ".join(names), 114, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    LIST.write_text(
        f'"""Written by tests/any_decoder.py: the model types whose connections were measured."""\n\n'
        f'MEASURED = frozenset(\n    """\n{listed}\n    """.split()\n)\n'
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    measured, chosen = {}, sys.argv[1:] or [*TYPES, "nanochat_2026"]
    with ProcessPoolExecutor() as pool:
        for each, of_type in zip(chosen, pool.map(verdicts, chosen), strict=True):
            print(each, of_type, flush=True)
            measured[each] = of_type
    if len(sys.argv) == 1:
        write(measured)
