"""A connection is a class that anyone can write, in any file."""

import copy
import json
import pickle
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import any_decoder
import pytest
import torch
from checkpoints import save_notes
from command_server import run
from conftest import cli
from small_decoders import small_decoder
from test_connected_commands import save_family
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM

import resformer
from resformer.configuration import METHODS, Paper
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import KINDS, BetweenLayers, Reads, Shape, coefficient
from resformer.training.optimizer import is_connection, is_decayed

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_connection.py"
MORE = EXAMPLE.with_name("more_connections.py")
README = EXAMPLE.parents[1] / "README.md"


@pytest.fixture(autouse=True)
def _classes_of_a_test_are_forgotten() -> Iterator[None]:
    kinds, methods = [*KINDS], dict(METHODS)
    modules, path = {*sys.modules}, [*sys.path]
    yield
    for name in {"damping", "two", "untrue"} & (sys.modules.keys() - modules):
        del sys.modules[name]
    sys.path[:] = path
    KINDS[:] = kinds
    METHODS.clear()
    METHODS.update(methods)


def make_tuned() -> type[resformer.Connection]:
    class Tuned(resformer.Connection):
        """x <- x + g f, and later layers read what the first MLP has added."""

        name, place, plain = "tuned", "mlp_added", {"init": 1.0}
        init: float = 0.5
        share: float = 0.0

        def __init__(self, shape: Shape, layer: int):
            super().__init__(shape, layer)
            self.gain = coefficient(1)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.gain.fill_(self.init)  # not by Transformers' own functions

        def forward(self, added: torch.Tensor, first: torch.Tensor | None = None) -> Any:
            mixed = added * self.gain.to(added.dtype)
            return (mixed if first is None else mixed + self.share * first), {"unmixed": added}

        @classmethod
        def reads(cls, shape: Shape, layer: int) -> Reads:
            return {"first": ("unmixed", 0)} if layer else {}

    return Tuned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "autocast"])
def test_the_readmes_class_runs_in_any_dtype(dtype: Any, tmp_path: Path) -> None:
    """Its parameters are float32: what it returns is rounded to what it was given."""
    names = {"torch": torch, "resformer": resformer}
    exec("class Damped(" + README.read_text().partition("class Damped(")[2].partition("\n\n\nresformer.")[0], names)
    small_decoder("llama").save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32 if dtype == "autocast" else dtype)
    model = resformer.connect(copy.deepcopy(plain), "damped")
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        assert torch.equal(any_decoder.logits_of(model), any_decoder.logits_of(plain))
        any_decoder.move(model)
        for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
            theirs.mlp.register_forward_hook(
                lambda _module, _args, added, gain=ours.damped.gain: (added * gain.detach()).to(added.dtype)
            )
        moved = any_decoder.logits_of(model)
        assert torch.equal(moved, any_decoder.logits_of(plain))
        assert all(each.isfinite().all() for each in any_decoder.gradients(model).values())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    any_decoder.assert_same(loaded, model)
    assert torch.equal(*(any_decoder.tokens_of(loaded, use_cache=each) for each in (True, False)))


def set_to_zero(self: Any) -> None:
    torch.nn.init.zeros_(self.gate.weight)
    self.gate.bias.data.fill_(0)  # in place: Transformers does not see that it changes a weight that was loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reset", [{}, {"reset_parameters": set_to_zero}], ids=["as made", "own"])
def test_modules_and_buffers_of_a_class_start_as_stated_and_are_loaded_as_they_were_saved(
    reset: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    def make(self: Any, shape: Shape, layer: int) -> None:
        resformer.Connection.__init__(self, shape, layer)
        self.gate, self.mix = torch.nn.Linear(64, 1), torch.nn.Linear(64, 64, bias=False)
        set_to_zero(self)
        self.register_buffer("decay", torch.linspace(0.5, 1, 64), persistent=False)
        self.register_buffer("count", torch.full([1], 3.0 + layer))

    def forward(self: Any, added: torch.Tensor) -> torch.Tensor:
        added = added.to(self.gate.weight.dtype)
        return added + self.gate(added) * self.mix(added) * self.decay * self.count

    kind = made_with(__init__=make, forward=forward, **reset)
    small_decoder("llama").to(dtype).save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    model = resformer.connect(copy.deepcopy(plain), kind)
    fresh = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", config=resformer.connected_config(AutoConfig.from_pretrained(tmp_path / "plain"), kind)
    )
    for each in (model, fresh, AutoModelForCausalLM.from_config(fresh.config, dtype=dtype)):
        assert each.model.layers[2].own.decay.tolist() == torch.linspace(0.5, 1, 64).tolist()
        assert each.model.layers[2].own.count.item() == 5
        assert each.model.layers[2].own.mix.weight.abs().max() > 0.1  # and not as the family draws weights
        assert {tensor.dtype for tensor in each.model.layers[2].own.state_dict().values()} == {torch.float32}
    for each in (model, fresh):
        assert torch.equal(any_decoder.logits_of(each), any_decoder.logits_of(plain))
    assert type(resformer.disconnect(copy.deepcopy(model))) is type(plain)  # weights that are drawn have no start
    any_decoder.move(model)
    model.model.layers[1].own.count += 1
    with pytest.raises(ValueError, match=r"Connections have learned: model\.layers\.0\.own\.gate\.weight"):
        resformer.disconnect(model)
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(each, loaded.state_dict()[name]) for name, each in model.state_dict().items())
    any_decoder.assert_same(loaded, model)
    resformer.save_connections(model, tmp_path / "alone")
    again = resformer.connect(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), str(tmp_path / "alone"))
    any_decoder.assert_same(again, model)
    assert resformer.inspect(tmp_path / "alone").added["layers.2.own.count"] == [1]
    resformer.retrofit(tmp_path / "plain", tmp_path / "out", kind.name, progress=False)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(any_decoder.logits_of(converted), any_decoder.logits_of(plain))
    assert converted.model.layers[2].own.count.item() == 5
    assert resformer.verify(tmp_path / "whole", tmp_path / "whole").same
    resformer.revert(tmp_path / "out", tmp_path / "back", progress=False)
    assert resformer.disconnect(model, lossy=True).config.architectures == ["LlamaForCausalLM"]


def test_what_a_class_does_between_layers_has_the_dtype_of_the_stream() -> None:
    class Scaled(resformer.Connection):
        name, plain = "scaled", {}

        def __init__(self, shape: Shape, layer: int):
            super().__init__(shape, layer)
            self.gain = torch.nn.Parameter(torch.ones(1))

        @classmethod
        def between(cls, modules: Any, of_decoder: Any) -> BetweenLayers:
            return Between(modules)

    class Between(BetweenLayers):
        def __init__(self, modules: Any):
            self.modules = modules

        def before(self, layer: int, hidden_states: torch.Tensor, earlier: Any, added: Any) -> torch.Tensor:
            return hidden_states * self.modules[layer].gain

        def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states * self.modules[layer].gain

    model = small_decoder("gemma3_text").bfloat16()
    expected = any_decoder.logits_of(model)
    assert torch.equal(any_decoder.logits_of(resformer.connect(model, Scaled)), expected)


def test_cards_lists_and_inspection_say_of_a_class_what_it_says_of_itself(tmp_path: Path) -> None:
    make_tuned()

    class Cited(resformer.Connection):
        name, place, plain = "cited", "mlp_added", {}
        title, equation = "A title", "it says $x_n + f$, $$ y_n $$"
        paper = Paper("2000.00001", "Of the title", "One, Some", 2020)

        def forward(self, added: torch.Tensor) -> torch.Tensor:
            return added

    assert "tuned: x <- x + g f, and later layers read what the first MLP has added.\n" in cli("methods").stdout
    base = tmp_path / "base"
    small_decoder("llama").save_pretrained(base)
    model = resformer.connect(AutoModelForCausalLM.from_pretrained(base), "cited")
    resformer.save_connections(model, tmp_path / "alone")
    card = (tmp_path / "alone" / "README.md").read_text()
    for said in (
        "- cited\n- arxiv:2000.00001\n",
        "A title\n\n* it says \\\\(x_n + f\\\\), $$ y_n $$\n",
        "title = {Of the title}",
        "year = {2020}",
    ):
        assert said in card, said
    assert resformer.inspect(tmp_path / "alone").method == "cited"
    resformer.save_connections(resformer.connect(model, "tuned"), tmp_path / "both")
    both = resformer.inspect(tmp_path / "both")
    assert (both.method, {*both.fields["connections"]}) == (None, {"tuned", "cited"})


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_that_has_the_fields_alone_is_connected_and_has_nothing_to_take_away(family: str) -> None:
    plain = small_decoder(family)
    model = AutoModelForCausalLM.from_config(resformer.connected_config(plain.config, "transformer"))
    model.load_state_dict(plain.state_dict())
    for take in (resformer.disconnect, lambda model: resformer.disconnected(model).__enter__()):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no connections"):
            take(model)
    resformer.connect(model, "denseformer")
    assert torch.equal(any_decoder.logits_of(model), any_decoder.logits_of(plain))
    assert type(model) is type(resformer.connect(plain, "denseformer"))
    assert resformer.connection_modules(model) == ["depth_average"]


def test_fields_are_set_by_name_and_tensors_reach_later_layers() -> None:
    make_tuned()
    base = small_decoder("llama")
    model = resformer.connect(small_decoder("llama"), tuned_init=1.0, tuned_share=0.25, lossy=True)
    added: list[torch.Tensor] = []

    def take(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        added.append(output)
        return output if len(added) == 1 else output + 0.25 * added[0]

    for layer in base.model.layers:
        layer.mlp.register_forward_hook(take)
    assert torch.allclose(any_decoder.logits_of(model), any_decoder.logits_of(base), atol=1e-6)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    kind = make_tuned()
    model = resformer.connect(small_decoder("llama"), "tuned")
    model.save_pretrained(tmp_path)
    for refused, said in (
        ({"connections": {"tuned": {"start": 1}}}, r"`connections`\['tuned'\] has 'start'"),
        ({"connections": {"tuned": {"init": "half"}}}, r"is 'half': expected a number"),
        ({"tuned_inti": 1.0}, r"`tuned_inti` is no connection field\. Did you mean 'tuned_init'\?"),
    ):
        with pytest.raises(ValueError, match=said):
            resformer.connect(small_decoder("llama"), refused)

    class Rotated(resformer.Connection):
        name, place, plain = "rotated", "raw_queries", {}

        def forward(self, queries: torch.Tensor) -> torch.Tensor:
            return queries

    with pytest.raises(ValueError, match=r"gpt2 cannot have `rotated`: in layer 0 its queries"):
        resformer.connect(small_decoder("gpt2"), "rotated")
    KINDS.remove(kind)
    with pytest.raises(
        ValueError, match=r"`connections` has 'tuned', of which there is no class: first.*`resformer --import FILE"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    for attributes, said in (
        ({"name": "own_mlp"}, "which loading a .* changes"),
        ({"name": "resformer"}, "which is taken by this package"),
        ({"name": "value_residual"}, "which is taken by this package"),
        ({"name": "not a name"}, "expected a name that a module can have"),
        ({"name": 3}, "expected a name that a module can have"),
        ({"name": "own", "place": "mlp_outptu"}, "expected one of .*mlp_added"),
        ({"name": "own"}, r"Own\.place is not set: expected one of .*mlp_added"),
        ({"name": "own", "place": "embeddings"}, "'embeddings': expected one of layer_input, .*mlp_added"),
        ({"name": "own", "place": "mlp_added", "order": "first"}, "Own.order is 'first': expected a number"),
        ({"name": "own", "place": "mlp_added"}, "Own has no `forward`, which takes the mlp_added"),
        ({"name": "own", "place": "mlp_added", "layers": lambda config: [1]}, "is asked of .* `@classmethod` above"),
        (
            {"name": "own", "place": ["mlp_added"], "forward": Rotated.forward, "plain": None},
            "plain is None: expected a",
        ),
        (
            {"name": "own", "place": "mlp_added", "forward": Rotated.forward, "plain": {"init": 1.0}, "init": 0.5},
            "Own.plain has 'init', which is no field: annotate it, `init: float",
        ),
    ):
        with pytest.raises(TypeError, match=said):
            type("Own", (resformer.Connection,), attributes)


def made_with(**members: Any) -> type[resformer.Connection]:
    """A class of what the MLP adds, without an effect."""
    members = {"name": "own", "place": "mlp_added", "plain": {}, "forward": lambda self, added: added} | members
    return type("Own", (resformer.Connection,), members)


def test_a_checkpoint_keeps_the_values_of_fields_that_get_other_defaults(tmp_path: Path) -> None:
    make_tuned()
    model = resformer.connect(small_decoder("llama"), "tuned")
    model.save_pretrained(tmp_path / "connected")
    config = resformer.connected_config(small_decoder("llama").config, "tuned", tuned_share=0.25)
    any_decoder.move(drawn := AutoModelForCausalLM.from_config(config))
    drawn.save_pretrained(tmp_path / "drawn")
    type("Later", (make_tuned(),), {"name": "tuned", "init": 3.0, "share": 2.0})
    for name, before in (("connected", model), ("drawn", drawn)):
        after = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(any_decoder.logits_of(after), any_decoder.logits_of(before))
        assert after.config.connections == before.config.connections
    assert drawn.config.connections == {"tuned": {"init": 0.5, "share": 0.25}}


def test_a_class_is_a_method_by_itself_and_among_others() -> None:
    fields = {"scale": 1.0, "__annotations__": {"scale": float}}
    kind = made_with(forward=lambda self, added, *_, **__: added, **fields)
    plain = any_decoder.logits_of(small_decoder("llama"))
    for method in (kind, [kind, "denseformer"], {kind: {}}):
        model = resformer.connect(small_decoder("llama"), method)
        assert (model.config.connections, model.config.dwa) == ({"own": {"scale": 1.0}}, isinstance(method, list))
        assert torch.equal(any_decoder.logits_of(model), plain)
        assert resformer.connected_config(small_decoder("llama").config, method).connections == model.config.connections
    made_with()
    for method, said in (
        (kind, "Own has no `name` of its own, or a later class has the same"),
        (type("Own", (kind,), {}), "Own has no `name` of its own"),
        (3, "`method` has 3: expected names of `METHODS`, classes of connections, or fields"),
    ):
        with pytest.raises(ValueError, match=said):
            resformer.connect(small_decoder("llama"), method)  # type: ignore[arg-type]


def test_a_class_that_fails_leaves_the_model_as_it_was() -> None:
    def broken(self: Any, shape: Shape, layer: int) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1))

    def reads(name: str, maker: Any, argument: str = "other") -> classmethod:
        return classmethod(lambda cls, shape, layer: {argument: (name, maker)} if layer else {})

    def takes_other(self: Any, added: torch.Tensor, other: Any = None) -> torch.Tensor:
        return added

    model = small_decoder("llama")
    before, kind = any_decoder.logits_of(model), type(model)
    for members, error, said in (
        ({"layers": classmethod(lambda cls, shape: [9])}, ValueError, "it has 4 layers, and none is layer 9"),
        ({"reads": reads("mlp_added", 0)}, ValueError, "`reads` names 'other', which its `forward` does not take"),
        (
            {"reads": reads("mlp_added", 0, "queries")},
            ValueError,
            "'queries', as a tensor of the layer itself is named",
        ),
        (
            {"reads": reads("mlp_added", None)},
            ValueError,
            r"has \('mlp_added', None\) for 'other' in layer 1: expected",
        ),
        (
            {"reads": reads("mlp_added", 2), "forward": takes_other},
            ValueError,
            "layer 1 would read the mlp_added of layer 2, which is none",
        ),
        ({"__init__": broken}, AttributeError, "before Module.__init__"),
        (
            {"__init__": lambda self, *_: torch.nn.Module.__init__(self)},
            TypeError,
            r"does not call `super\(\).__init__",
        ),
    ):
        with pytest.raises(error, match=said):
            resformer.connect(model, made_with(**members))
        assert type(model) is kind
        assert torch.equal(any_decoder.logits_of(model), before)
    for members, said in (
        (
            {"reads": reads("mlp_outputs", 0), "forward": takes_other},
            "mlp_outputs: it is no place, .* Did you mean 'mlp_input'",
        ),
        ({"forward": lambda self, added: added.add_(1)}, "`own` changes a tensor in place at mlp_added, .*`x = x"),
        ({"forward": lambda self, added: (added, added)}, r"`own` returns tuple at .*, alone or as `\(tensor, {name"),
        ({"forward": lambda self, added, ohter: added}, "`own` takes 'ohter' at mlp_added, which layer 0 lacks"),
        (
            {"forward": lambda self, added: None},
            "`own` returns NoneType at mlp_added: its `forward` returns the tensor",
        ),
        (
            {"forward": lambda self, added: added[0]},
            r"`own` returns a tensor of shape \(9, 64\) at mlp_added: .* \(2, 9, 64\)",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            any_decoder.logits_of(resformer.connect(small_decoder("llama"), made_with(**members)))


def test_a_class_without_plain_is_told_and_one_without_reset_parameters_starts_as_made(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def weighted(self: Any, shape: Shape, layer: int) -> None:
        resformer.Connection.__init__(self, shape, layer)
        self.weight = torch.nn.Parameter(torch.full([shape.hidden_size], 0.5 + layer))

    small_decoder("llama").save_pretrained(tmp_path / "plain")
    kind = made_with(__init__=weighted, plain=resformer.Connection.plain)
    connected = resformer.connect(small_decoder("llama"), kind)
    assert "own states no `plain`" in caplog.text
    config = resformer.connected_config(AutoConfig.from_pretrained(tmp_path / "plain"), kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", config=config)
    assert pickle.loads(pickle.dumps(connected.model.layers[1].own.made_of))[1] == 1
    for model in (connected, copy.deepcopy(connected), loaded):
        assert [each.own.weight.mean().item() for each in model.model.layers] == [0.5, 1.5, 2.5, 3.5]


def test_a_class_that_does_not_start_plainly_has_an_effect() -> None:
    def gain(self: Any, shape: Shape, layer: int) -> None:
        resformer.Connection.__init__(self, shape, layer)
        self.gain = torch.nn.Parameter(torch.full([1], self.init))

    members = {"__annotations__": {"init": float}, "init": 0.5, "plain": {"init": 1.0}, "__init__": gain}
    kind = made_with(**members, forward=lambda self, added: added * self.gain)
    model = AutoModelForCausalLM.from_config(resformer.connected_config(small_decoder("llama").config, kind))
    with pytest.raises(ValueError, match=r"own\.gain is 0\.5 from no effect"):
        resformer.disconnect(model)
    resformer.disconnect(resformer.connect(small_decoder("llama"), kind))


def test_the_order_at_one_place_is_stated_and_not_the_alphabets() -> None:
    ran: list[str] = []

    def make(name: str, order: float) -> None:
        def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
            ran.append(name)
            return states

        members = {"name": name, "place": "layer_output", "plain": {}, "order": order, "forward": forward}
        type(name, (resformer.Connection,), members)

    make("second", 1.0)
    make("a_third", 2.0)
    make("z_first", 0.0)
    any_decoder.logits_of(resformer.connect(small_decoder("llama"), ["a_third", "second", "z_first"]))
    assert ran[:3] == ["z_first", "second", "a_third"]


def test_commands_take_methods_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, notes = tmp_path / "damping.py", ("--data", "notes.txt", "--sample-by", "paragraph", "--held-out", 0.1)
    file.write_text(EXAMPLE.read_text())
    (tmp_path / "two.py").write_text(f"{EXAMPLE.read_text()}\nclass Other(Damped):\n    name = 'other'\n")
    save_notes(tmp_path)
    save_family(tmp_path / "source", "qwen3_moe")
    done = cli("convert", "source", "out", "--method", "damping.py:damped", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["fields"] == {"connections": {"damped": {"init": 1.0}}}
    inspected = json.loads(cli("--import", file, "inspect", "out", "--json").stdout)
    assert (inspected["method"], inspected["learned"]) == ("damped", {"damped": 0.0})
    assert "import damping  # a file that defines the connection damped" in Path("out/README.md").read_text()
    tuned = ("--steps", 1, "--block", 32, "--no-bf16", "--train", "connections", *notes)
    assert cli("--import", file, "finetune", "out", "tuned", *tuned).exit_code == 0
    inspected = json.loads(cli("--import", file, "inspect", "tuned/connections", "--json").stdout)
    assert inspected["learned"]["damped"] > 0
    study = ("--methods", "damping.py,damping.py:damped:damped_init=0.9", "--steps", 1, "--block", 32, "--batch", 2)
    done = cli("compare", "study", "--from", "source", *study, "--seeds", 1, "--no-bf16", *notes, "--json")
    assert done.exit_code == 0, done.stderr
    [rows] = json.loads(done.stdout)["sizes"].values()
    assert [row["method"] for row in rows] == ["transformer", "damped", "damped:damped_init=0.9"]
    done = cli("new", "new", "--method", "damping.py", "--tokenizer", "bytes", "--set", "damped_init=0.7", "--json")
    assert json.loads(done.stdout)["connections"] == {"damped": {"init": 0.7}}
    for named, said in (
        ("damping.py:dmped", "damping.py: has no connection 'dmped'; expected damping.py:NAME, with one of damped."),
        ("two.py", "two.py: has several connections; expected two.py:NAME, with one of damped, other."),
        ("absent.py:damped", "absent.py: there is no such file."),
        ("json.py", "json.py: its name is not free for a module of its own: rename it."),
    ):
        Path("json.py").write_text("")
        refused = cli("convert", "source", "none", "--method", named)
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
    Path("untrue.py").write_text(f"{EXAMPLE.read_text()}\nclass Untrue(Damped):\n    name, plain = 'untrue', {{}}\n")
    refused = cli("convert", "source", "none", "--method", "untrue.py:untrue")
    assert (refused.exit_code, "the `plain` of untrue is not plain" in refused.stderr) == (4, True), refused.stderr


def test_the_example_is_short_and_prints_what_the_page_says() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    done = run("-c", f"import runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    assert done.stdout == "logits unchanged: True\nparameters added: 4\n", done.stderr


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_table_and_residuals_of_keys_are_what_they_say(family: str, tmp_path: Path) -> None:
    """The reference is the family's own model, whose projections have hooks."""
    runpy.run_path(str(MORE))
    base = small_decoder(family)
    model = resformer.connect(small_decoder(family), ["one_table", "key_residual"])
    assert torch.equal(any_decoder.logits_of(model), any_decoder.logits_of(base))
    any_decoder.move(model)
    layers, upper = model.model.layers, len(model.model.layers) // 2
    assert [name for name, _ in model.named_parameters() if "table.weight" in name] == [
        f"model.layers.{upper}.one_table.table.weight"
    ]
    raw: dict[str, torch.Tensor] = {}
    rows = layers[upper].one_table.table.weight[any_decoder.IDS]
    for n, layer in enumerate(base.model.layers):
        if n:
            gain = layers[n].key_residual.gain
            layer.self_attn.k_proj.register_forward_hook(lambda _, args, keys, g=gain: keys + g * raw["keys"])
        else:
            layer.self_attn.k_proj.register_forward_hook(lambda _, args, keys: raw.update(keys=keys))
        if n >= upper:
            gain = layers[n].one_table.gain
            layer.self_attn.v_proj.register_forward_hook(lambda _, args, values, g=gain: values + g * rows)
    expected = any_decoder.logits_of(base)
    assert not torch.equal(expected, any_decoder.logits_of(small_decoder(family)))
    torch.testing.assert_close(any_decoder.logits_of(model), expected)
    assert any_decoder.caches_agree(model)
    with pytest.raises(ValueError, match="`one_table` looks up rows of tokens"):
        model(inputs_embeds=torch.zeros(1, 2, model.config.hidden_size))
    model.save_pretrained(tmp_path / "saved")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(any_decoder.logits_of(reloaded), any_decoder.logits_of(model))


def test_an_attention_that_is_checkpointed_alone_reads_nothing_of_its_first_run() -> None:
    one_table = runpy.run_path(str(MORE))["OneTable"]  # its layers look up what they are not given
    gradients = []
    for wrap in (lambda module: module, checkpoint_wrapper):
        model = resformer.connect(small_decoder("llama"), one_table).train()
        any_decoder.move(model)
        for layer in model.model.layers:
            layer.self_attn = wrap(layer.self_attn)
        gradients.append([*any_decoder.all_gradients(model).values()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["post_feedforward_layernorm", "hidden_size"])
def test_a_name_that_a_layer_has_already_is_refused_before_the_model_is_changed(name: str) -> None:
    kind, model = made_with(name=name), small_decoder("gemma3_text")
    with pytest.raises(ValueError, match=f"have an attribute '{name}' of their own: choose another name"):
        resformer.connect(model, kind)
    assert type(model).__name__ == "Gemma3ForCausalLM"


def test_a_class_that_is_named_as_a_part_of_a_family_leaves_that_family_alone() -> None:
    for name in ("experts", "rotary_emb"):
        type(name, (make_tuned(),), {"name": name})
    model = small_decoder("qwen3_moe")
    before = {name: id(each) for name, each in model.named_modules()}
    groups = [name for name, each in model.named_parameters() if is_decayed(name, each)]
    resformer.connect(resformer.connect(model, "denseformer"), "resformer-gated")
    assert resformer.connection_modules(model) == ["depth_average", "value_residual"]
    assert [name for name, each in model.named_parameters() if is_decayed(name, each)] == groups
    assert {name for name, _ in model.named_parameters() if is_connection(name)} == {
        f"{name}.{each}" for name, module in added_modules(model).items() for each, _ in module.named_parameters()
    }
    resformer.disconnect(model)
    assert {name: id(each) for name, each in model.named_modules()} == before


def test_two_classes_that_return_one_tensor_and_one_of_values_that_are_shared_are_refused() -> None:
    make_tuned()
    type("Other", (make_tuned(),), {"name": "other"})
    with pytest.raises(ValueError, match="`other` and `tuned` both return 'unmixed' in layer 0: give one of them"):
        any_decoder.logits_of(resformer.connect(small_decoder("llama"), ["tuned", "other"]))
    made_with(place="raw_values")
    model = small_decoder("llama")
    with pytest.raises(ValueError, match="cannot have `own`: layer 1 takes from layer 0 what would be its raw_values"):
        resformer.connect(model, ["svformer", "own"], lossy=True)
    made_with(place="raw_values", layers=classmethod(lambda cls, shape: [0]))
    any_decoder.logits_of(resformer.connect(model, ["svformer", "own"], lossy=True))


def test_two_classes_that_read_two_tensors_under_one_name_are_refused() -> None:
    def other(cls: Any, shape: Shape, layer: int) -> Reads:
        return {"first": ("layer_output", 0)} if layer else {}

    make_tuned()
    members = {"name": "other", "place": "mlp_input", "plain": {}, "reads": classmethod(other)}
    type("Other", (resformer.Connection,), members | {"forward": lambda self, states, first=None: states})
    with pytest.raises(ValueError, match="`other` and `tuned` read two tensors as 'first' in layer 1"):
        resformer.connect(small_decoder("llama"), ["tuned", "other"])
