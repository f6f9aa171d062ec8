"""The connections, a small dataclass each: fields of a configuration, methods that set them, papers, what cards say."""

import difflib
import functools
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, Literal

from huggingface_hub.dataclasses import as_validated_field
from huggingface_hub.errors import StrictDataclassError

from resformer.configuration.about import About, Method, Paper
from resformer.configuration.sources import mixing_layers, value_sources


def reason(error: BaseException) -> str:
    """What a validator of huggingface_hub's says: the field and what is wrong with it, in one line.

    Where one of several values is expected, the one that was probably meant is named.
    """
    named = re.match(
        r"(?:Class v|V)alidation error for (?:validator '\w+'|field ('\w+')):\s+\w+: (.*)", str(error), re.S
    )
    if named is None:
        return str(error)
    field = "" if named[1] is None or named[2].startswith("Field ") else f"Field {named[1]}: "
    told = " ".join(f"{field}{named[2]}".split())
    if expected := re.search(r"expected one of \((.+)\), got (.+)$", told):
        close = difflib.get_close_matches(expected[2], re.findall(r"'(\w+)'", expected[1]), n=1)
        told += "".join(f". Did you mean {each!r}?" for each in close)
    return told


def told_in_one_line(config: Any) -> Any:
    """Makes errors of a new configuration one line: `reason`."""
    begin = config.__init__

    @functools.wraps(begin)
    def init(self: Any, *given: Any, **named: Any) -> None:
        try:
            begin(self, *given, **named)
        except StrictDataclassError as error:
            error.args = (reason(error),)
            raise error.with_traceback(None) from None

    config.__init__ = init
    return config


def _field(is_allowed: Callable[[Any], bool], expected: str) -> Any:
    """Makes fields whose value, where it is not None, has to be allowed."""

    def check(value: float | None = None) -> None:
        if value is not None and not is_allowed(value):
            raise ValueError(f"Value must be {expected}, got {value}")

    return as_validated_field(check)


positive = _field(lambda value: value >= 1, "a positive integer")
several = _field(lambda value: value >= 2, "an integer from 2 up")
finite = _field(math.isfinite, "a finite number")
positive_number = _field(lambda value: 0 < value < math.inf, "a finite number above 0")
mudd_letters = _field(lambda value: 0 < len(value) == len({*value} & {*"qkvr"}), "letters of 'qkvr', each once at most")
not_negative = _field(lambda value: 0 <= value < math.inf, "a finite number from 0 up")


# What is said of a method was compared with the paper's own text or its authors' code, but for sentences marked "from
# secondary sources". Of arXiv 2410.17897 a first version, as it was submitted to a conference, could be read: it has
# Identity-ResFormer, the 2 and 1 of Constant-ResFormer, SVFormer and both numbers of NeuTRENO. The other variants came
# later; of learned coefficients its author writes in issue 2 of his code. Read were also 2402.02622, 2405.12981,
# 2409.19606, 2502.12170, 2512.03870, 2512.24880, 2606.02780 and 2607.27230; of 2312.00751, 2605.18855 and 2606.05014
# the abstract and the authors' code, of 2603.15031 the published pseudo-code.
# Layers are counted n = 0..N-1. V_n are the raw values of layer n, X_0 the embeddings, X_{n+1} the output of block n.


def _last_third(num_layers: int) -> list[int]:
    """The layers that Sparse-ResFormer mixes: the last three of eight, generalised to the last third, never layer 0.

    Bank of Values has its tables in the last third too.
    """
    return list(range(max(1, num_layers - -(-num_layers // 3)), num_layers))


def _pairs(num_layers: int) -> list[int]:
    """CLA2: layers 2i and 2i + 1 use the keys or values of layer 2i."""
    return [layer - layer % 2 for layer in range(num_layers)]


def _second_half(num_layers: int, source: int) -> list[int]:
    """FusedKV-Lite: layers from N // 2 on use the keys or values of layer `source`."""
    half = max(1, num_layers // 2)
    return [*range(half), *[min(source, half - 1)] * (num_layers - half)]


RESFORMER = Paper(
    "2410.17897",
    "Value Residual Learning",
    "Zhou, Zhanchao and Wu, Tianyi and Jiang, Zhiyun and Obeid, Fares and Lan, Zhenzhong",
    2025,
)
DEPTH_ATTENTION = Paper(
    "2606.05014",
    "{Depth-Attention}: Cross-Layer Value Mixing for Language Models",
    "Zeng, Boyi and Hao, Yiqin and Wang, Zitong and Song, Shixiang and Li, He and Song, Feichen and Liu, Yifan "
    "and He, Ziwei and Wang, Xinbing and Lin, Zhouhan",
    2026,
)


@dataclass(kw_only=True, repr=False, eq=False)
class ValueResidualFields:
    r"""Values of a layer and of earlier ones (ResFormer, arXiv 2410.17897; Depth-Attention, arXiv 2606.05014).

    Args:
        value_residual (`str`, defaults to `"none"`):
            How the values of a mixing layer are made from its own and earlier layers': `"none"`, `"identity"`,
            `"constant"`, `"learnable"`, `"learnable_plus"`, `"dense"`, `"gated"` or `"depth_attention"`, whose
            equations are in `modeling/connections/value_residual.py` and `depth_attention.py`. `"depth_attention"`
            takes `key_sources`, but no `value_sources`.
        value_residual_init (`list[float]`, defaults to [0.5, 0.5]):
            The coefficients on V_0 and V_n: the values of `"constant"`, the start of the learned modes. `"identity"`
            and `"depth_attention"` ignore it. (0, 1) starts as plain Llama.
        value_residual_layers (`list[int]`, *optional*):
            The layers that mix, from 1 to `num_hidden_layers - 1`, ascending (Sparse-ResFormer). Default: every layer
            but 0 that has values of its own.
        depth_attention_stride (`int`, defaults to 1):
            The stride s of `"depth_attention"`: layer n mixes layers 0, s, 2s, ... below it, and itself.
        depth_attention_init (`float`, defaults to 1.0):
            The start of the gates of `"depth_attention"`. 1 is as without gates, 0 plain Llama.
    """

    value_residual: Literal[
        "none", "identity", "constant", "learnable", "learnable_plus", "dense", "gated", "depth_attention"
    ] = "none"
    value_residual_init: list[int | float] | tuple[int | float, ...] = (0.5, 0.5)
    value_residual_layers: list[int] | None = None
    depth_attention_stride: int = positive(default=1)
    depth_attention_init: int | float = finite(default=1.0)

    about = {
        "value_residual": About(
            "value-residual", r"values are mixed over layers, $V'_n = \sum_{m \le n} M_{n,m} V_m$", RESFORMER
        ),
        "value_residual.depth_attention": About(
            "value-residual",
            r"values are mixed over layers, $V'_n = V_n + g_n (\tilde V_n - V_n)$, by a softmax over the keys "
            r"of earlier layers at the same token",
            DEPTH_ATTENTION,
        ),
    }
    methods = {
        "resformer": Method(
            "ResFormer (learnable value residual)",
            "Each layer after the first attends to a learned mix of its own values and those of layer 0.",
            lambda n: {"value_residual": "learnable"},
            (RESFORMER,),
        ),
        "resformer-identity": Method(
            "Identity-ResFormer",
            "Each layer after the first attends to the mean of its own values and those of layer 0; nothing to learn.",
            lambda n: {"value_residual": "identity"},
            (RESFORMER,),
        ),
        "resformer-constant": Method(
            "Constant-ResFormer",
            "Identity-ResFormer with other fixed coefficients: twice the values of layer 0 on top of the layer's own.",
            lambda n: {"value_residual": "constant", "value_residual_init": [2.0, 1.0]},
            (RESFORMER,),
        ),
        "resformer-plus": Method(
            "ResFormer-Plus",
            "A softmax over the layers distributes one learned scale among the coefficients on layer 0's values "
            "(from secondary sources).",
            lambda n: {"value_residual": "learnable_plus"},
            (RESFORMER,),
        ),
        "resformer-sparse": Method(
            "Sparse-ResFormer",
            "A constant value residual in the last third of the layers only, with a coefficient of 5 on layer 0 "
            "(from secondary sources).",
            lambda n: {
                "value_residual": "constant",
                "value_residual_init": [5.0, 1.0],
                "value_residual_layers": _last_third(n),
            },
            (RESFORMER,),
        ),
        "resformer-dense": Method(
            "Dense-ResFormer",
            "Each layer attends to a learned mix of the values of all layers up to it (from secondary sources).",
            lambda n: {"value_residual": "dense"},
            (RESFORMER,),
        ),
        "resformer-gated": Method(
            "Gated ResFormer",
            "The coefficient on layer 0's values depends on the token and on the key/value head. Designed for "
            "this package after RWKV-7 and x-transformers; SATFormer (arXiv 2605.03953) is near it, with a relu "
            "where this has a tanh.",
            lambda n: {"value_residual": "gated"},
            (RESFORMER,),
        ),
        "depth-attention": Method(
            "Depth-Attention",
            "Each layer mixes the values of layer 0, and above the middle those of the middle layer, into its "
            "own, by a softmax of its query over their keys at the same token.",
            lambda n: {"value_residual": "depth_attention", "depth_attention_stride": max(1, n // 2)},
            (DEPTH_ATTENTION,),
        ),
    }


BANK_OF_VALUES = Paper(
    "2606.02780",
    "Do Value Vectors in Deep Layers Need Context from the Residual Stream?",
    "He, Muyu and Liu, Yuchen and Huang, Qingya and Zhang, Li",
    2026,
)


@dataclass(kw_only=True, repr=False, eq=False)
class ValueEmbeddingFields:
    r"""A row of a table for each token, added to values (modded-nanogpt, nanochat; Bank of Values, arXiv 2606.02780).

    Args:
        value_embeddings (`list[int]`, *optional*):
            The layers that add to their values a row of a table, picked by the token and gated per key/value head (in
            Bank of Values the row is the value), ascending. A table has `vocab_size` x `num_key_value_heads` x
            `head_dim` numbers. The model then needs `input_ids`.
        value_embeddings_init (`float`, *optional*):
            The standard deviation that the tables start with; 0 starts as plain Llama. Default: `initializer_range`, as
            of every other embedding and projection.
        value_embeddings_gate_channels (`int`, defaults to 12):
            Number of channels of the layer's input that the gate reads.
        value_embeddings_gate_limit (`float`, defaults to 3.0):
            The gate's largest value.
    """

    value_embeddings: list[int] | None = None
    value_embeddings_init: int | float | None = not_negative(default=None)
    value_embeddings_gate_channels: int = positive(default=12)
    value_embeddings_gate_limit: int | float = finite(default=3.0)

    about = {
        "value_embeddings": About(
            "value-embedding",
            "a row of a table, picked by the token, is added to the values of some layers",
            BANK_OF_VALUES,
        ),
    }
    methods = {
        "value-embeddings": Method(
            "Value embeddings",
            "The last third of the layers add to their values a row of a table, picked by the token, through a "
            "gate that depends on the token and on the key/value head. In Bank of Values the row, times a "
            "learned number, is the value.",
            lambda n: {"value_embeddings": _last_third(n)},
            (BANK_OF_VALUES,),
        ),
    }


CLA = Paper(
    "2405.12981",
    "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
    "Brandon, William and Mishra, Mayank and Nrusimha, Aniruddha and Panda, Rameswar and Ragan-Kelley, Jonathan",
    2024,
)
FUSEDKV = Paper(
    "2512.03870",
    "Reconstructing {KV} Caches with Cross-Layer Fusion for Enhanced Transformers",
    "Lin, Hongzhan and Bai, Zhiqi and Zhang, Xinmiao and Yang, Sen and Li, Xiang and Yang, Siran and Xu, "
    "Yunlong and Liu, Jiaheng and Zhao, Yongchi and Wang, Jiamang and Xu, Yuchi and Su, Wenbo and Zheng, Bo",
    2026,
)


@dataclass(kw_only=True, repr=False, eq=False)
class SharingFields:
    r"""Keys and values of another layer (SVFormer, arXiv 2410.17897; CLA, arXiv 2405.12981).

    A source comes no later than its reader, is its own source, and has the reader's kind of layer (`layer_types`).

    Args:
        value_sources (`list[int]`, *optional*):
            Layer n attends to the values of layer `value_sources[n]` and has no `v_proj` unless that is n itself.
            `[0] * N` is SVFormer.
        key_sources (`list[int]`, *optional*):
            The same for keys and `k_proj`. `[0, 0, 2, 2, ...]` in both is CLA2.
    """

    value_sources: list[int] | None = None
    key_sources: list[int] | None = None

    about = {
        "value_sources": About(
            "kv-sharing",
            "layer n attends with the keys of layer `key_sources[n]` to the values of layer `value_sources[n]`, "
            "and stores none that it reads from another",
            RESFORMER,
        ),
        "key_sources": About(
            "kv-sharing cross-layer-attention",
            "layer n attends with the keys of layer `key_sources[n]` to the values of layer `value_sources[n]`, "
            "and stores none that it reads from another",
            CLA,
        ),
    }
    methods = {
        "svformer": Method(
            "SVFormer",
            "Every layer attends to the values of layer 0; there is one value projection and one value cache.",
            lambda n: {"value_sources": [0] * n},
            (RESFORMER,),
        ),
        "cla2": Method(
            "CLA2 (cross-layer attention)",
            "Pairs of layers share the keys and values of the first of the two.",
            lambda n: {"key_sources": _pairs(n), "value_sources": _pairs(n)},
            (CLA,),
        ),
        "fusedkv-lite": Method(
            "FusedKV-Lite",
            "The upper half of the layers reads the values of layer 0 and the keys of the lower half's last layer.",
            lambda n: {
                "key_sources": _second_half(n, max(1, n // 2) - 1),
                "value_sources": _second_half(n, 0),
            },
            (FUSEDKV,),
        ),
    }


NEUTRENO = Paper(
    "2312.00751",
    "Mitigating Over-smoothing in Transformers via Regularized Nonlocal Functionals",
    "Nguyen, Tam and Nguyen, Tan M. and Baraniuk, Richard G.",
    2023,
)


@dataclass(kw_only=True, repr=False, eq=False)
class NeutrenoFields:
    r"""NeuTRENO (arXiv 2312.00751).

    Args:
        neutreno_lambda (`float`, defaults to 0.0):
            The term l (V_0 - V'_n), added to the attention output of every layer but 0 (0.4 in its language models).
            Finite and not negative.
    """

    neutreno_lambda: int | float = not_negative(default=0.0)

    about = {
        "neutreno_lambda": About(
            "neutreno",
            r"a multiple of the difference from $V_0$ is added to the attention output, $U_n = A_n V'_n + \lambda "
            r"(V_0 - V'_n)$, with $V'_n$ the values that layer n attends to",
            NEUTRENO,
        ),
    }
    methods = {
        "neutreno": Method(
            "NeuTRENO",
            "Adds a multiple of V_0 - V_n to the attention output of layer n, against over-smoothing.",
            lambda n: {"neutreno_lambda": 0.4},
            (NEUTRENO,),
        ),
    }


DENSEFORMER = Paper(
    "2402.02622",
    "{DenseFormer}: Enhancing Information Flow in Transformers via Depth Weighted Averaging",
    r"Pagliardini, Matteo and Mohtashami, Amirkeivan and Fleuret, Fran{\c{c}}ois and Jaggi, Martin",
    2024,
)


@dataclass(kw_only=True, repr=False, eq=False)
class DepthAverageFields:
    r"""Depth-weighted averaging of all earlier layers' outputs (DenseFormer, arXiv 2402.02622).

    Args:
        dwa (`bool`, defaults to `False`):
            Whether there are averages.
        dwa_dilation, dwa_period (`int`, default to 1):
            DenseFormer's k x p: average after every p-th block, over every k-th earlier output.
    """

    dwa: bool = False
    dwa_dilation: int = positive(default=1)
    dwa_period: int = positive(default=1)

    about = {
        "dwa": About(
            "depth-weighted-averaging denseformer",
            r"hidden states are averaged over depth, $Y_n = \sum_{j \le n+1} D_{n,j} X_j$",
            DENSEFORMER,
        ),
    }
    methods = {
        "denseformer": Method(
            "DenseFormer (1x1)",
            "After each block the hidden state is a learned average of the embeddings and of all blocks' "
            "outputs so far.",
            lambda n: {"dwa": True},
            (DENSEFORMER,),
        ),
        "denseformer-4x5": Method(
            "DenseFormer 4x5",
            "DenseFormer after every fifth block, over every fourth output: most of the gain, little of the cost.",
            lambda n: {"dwa": True, "dwa_dilation": 4, "dwa_period": 5},
            (DENSEFORMER,),
        ),
    }


DELTA = Paper(
    "2605.18855",
    "Delta Attention Residuals",
    "Luo, Cheng and Cai, Zefan and Hu, Junjie",
    2026,
)
MUDD = Paper(
    "2502.12170",
    "{MUDDFormer}: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense Connections",
    "Xiao, Da and Meng, Qingye and Li, Shengping and Yuan, Xingyuan",
    2025,
)
HYPER = Paper(
    "2409.19606",
    "Hyper-Connections",
    "Zhu, Defa and Huang, Hongzhi and Huang, Zihao and Zeng, Yutao and Mao, Yunyao and Wu, Banggu and Min, Qiyang and "
    "Zhou, Xun",
    2025,
)
MHC = Paper(
    "2512.24880",
    "{mHC}: Manifold-Constrained Hyper-Connections",
    "Xie, Zhenda and Wei, Yixuan and Cao, Huanqi and others",
    2025,
)
ATTNRES = Paper("2603.15031", "Attention Residuals", "{Kimi Team}", 2026)
MHAR = Paper(
    "2607.27230",
    "Multi-Head Attention Residuals",
    "Luo, Cheng and Cai, Zefan and Hu, Junjie",
    2026,
)


@dataclass(kw_only=True, repr=False, eq=False)
class DeltaAttentionResidualFields:
    r"""Delta attention residuals (arXiv 2605.18855), for each head (arXiv 2607.27230), times a learned gate.

    Args:
        delta_attention_residuals (`bool`, defaults to `False`):
            Sublayers read, beside the residual stream, a softmax over what earlier blocks of layers added to it.
        delta_attention_residual_blocks (`int`, defaults to 8):
            Number of blocks, from 1 to `num_hidden_layers`.
        delta_attention_residual_init (`float`, defaults to 1.0):
            The start of the gates. 0 starts as plain Llama.
    """

    delta_attention_residuals: bool = False
    delta_attention_residual_blocks: int = positive(default=8)
    delta_attention_residual_init: int | float = finite(default=1.0)

    about = {
        "delta_attention_residuals": About(
            "delta-attention-residuals",
            r"attention and MLP also read what earlier blocks of layers added, $h_i = x_i + g_i \sum_b a_{i,b} "
            r"D_b$",
            MHAR,
        ),
    }
    methods = {
        "delta-attention-residuals": Method(
            "Multi-head delta attention residuals, gated",
            "Attention and MLP also read a softmax over what earlier blocks of layers added to the residual "
            "stream, for each slice of the width, times a learned gate.",
            lambda n: {
                "delta_attention_residuals": True,
                "delta_attention_residual_blocks": min(8, n),
            },
            (DELTA, MHAR),
        ),
    }


@dataclass(kw_only=True, repr=False, eq=False)
class AttnResFields:
    r"""Attention Residuals (arXiv 2603.15031).

    Args:
        attnres (`bool`, defaults to `False`):
            Sublayers and the final norm read, in place of the residual stream, a softmax over the embeddings and what
            sublayers have added to it.
        attnres_blocks (`int`, *optional*):
            Number of blocks of layers whose sums are read, from 1 to `num_hidden_layers`; 8 in the paper's large
            models. Default: each sublayer's output is read by itself.
        attnres_init (`float`, *optional*):
            The start of gates between the stream and the softmax. 0 starts as plain Llama. Default: no gates, as in the
            paper.
    """

    attnres: bool = False
    attnres_blocks: int | None = positive(default=None)
    attnres_init: int | float | None = finite(default=None)

    about = {
        "attnres": About(
            "attention-residuals attnres",
            r"attention, MLP and the final norm read a softmax over the embeddings and what sublayers have added, "
            r"$\sum_j a_{i,j} b_j$, in place of the residual stream",
            ATTNRES,
        ),
    }
    methods = {
        "attnres": Method(
            "Attention Residuals (AttnRes)",
            "Attention, MLP and the final norm read, in place of the residual stream, a softmax over the embeddings "
            "and the sums of what up to eight blocks of layers have added; a retrofit has gates between the two. From "
            "the published pseudo-code.",
            lambda n: {"attnres": True, "attnres_blocks": min(8, n)},
            (ATTNRES,),
        ),
    }


@dataclass(kw_only=True, repr=False, eq=False)
class MuddFields:
    r"""Multiway dynamic dense connections (MUDDFormer, arXiv 2502.12170).

    Args:
        mudd (`bool`, defaults to `False`):
            Layers and the final norm read sums of the embeddings and all earlier outputs, with weights that depend on
            the token. It starts as plain Llama.
        mudd_channels (`str`, defaults to `"qkvr"`):
            What has sums of its own: queries, keys, values, and the residual stream (`"r"`), which others else read.
        mudd_norm (`bool`, defaults to `False`):
            Outputs are normed before they are summed, and the stream's sum afterwards: PrePostDANorm, section 2.5, for
            models that are deep for their width.
    """

    mudd: bool = False
    mudd_channels: str = mudd_letters(default="qkvr")
    mudd_norm: bool = False

    about = {
        "mudd": About(
            "muddformer mudd",
            r"queries, keys, values and the residual stream each read a sum of all earlier outputs, $X^c_i = X_i + "
            r"\sum_{j \le i} A^c_{i,j} X_j$, whose weights depend on the token",
            MUDD,
        ),
    }
    methods = {
        "mudd": Method(
            "MUDDFormer (multiway dynamic dense connections)",
            "Queries, keys, values and the residual stream of each layer read sums of the embeddings and all earlier "
            "outputs, each with its own weights, which depend on the token.",
            lambda n: {"mudd": True},
            (MUDD,),
        ),
    }


@dataclass(kw_only=True, repr=False, eq=False)
class EmbeddingResidualFields:
    r"""The embeddings beside the stream (modded-nanogpt, nanochat).

    Args:
        embedding_residual (`bool`, defaults to `False`):
            Each layer reads r x + s X_0 in place of the residual stream x; X_0 are the embeddings, r and s are learned.
        embedding_residual_init (`float`, defaults to 0.1):
            The start of s; r starts at 1. 0 starts as plain Llama.
    """

    embedding_residual: bool = False
    embedding_residual_init: int | float = finite(default=0.1)

    about = {
        "embedding_residual": About(
            "embedding-residual", "each layer reads $r_n x + s_n X_0$ in place of the residual stream $x$"
        ),
    }


@dataclass(kw_only=True, repr=False, eq=False)
class BackoutFields:
    r"""A middle layer's output, taken out of what the final norm reads (nanochat).

    Args:
        backout (`bool`, defaults to `False`):
            The output of layer `num_hidden_layers // 2`, times a learned number, is taken out of what the final norm
            reads.
        backout_init (`float`, defaults to 0.2):
            The start of that number. 0 starts as plain Llama.
    """

    backout: bool = False
    backout_init: int | float = finite(default=0.2)

    about = {
        "backout": About(
            "backout", "a multiple of the output of the middle layer is taken out of what the final norm reads"
        ),
    }


_STREAMS = (
    r"there are several residual streams, $h_i \leftarrow \sum_j R_{ij} h_j + b_i f(\sum_j p_j h_j)$ for each "
    "sublayer f"
)


@dataclass(kw_only=True, repr=False, eq=False)
class HyperConnectionFields:
    r"""Several residual streams (hyper-connections, arXiv 2409.19606; mHC, arXiv 2512.24880).

    Args:
        hyper_connections (`str`, defaults to `"none"`):
            How sublayers read and write the streams: `"static"` or `"dynamic"` (2409.19606), `"mhc"` (2512.24880), or
            `"ihc"`, which is mHC with streams that are not mixed; equations in
            `modeling/connections/hyper_connections.py`.
        hyper_streams (`int`, defaults to 4):
            Number of streams, from 2 up.
    """

    hyper_connections: Literal["none", "static", "dynamic", "mhc", "ihc"] = "none"
    hyper_streams: int = several(default=4)

    about = {
        "hyper_connections": About("hyper-connections", _STREAMS, HYPER),
        "hyper_connections.mhc": About("mhc hyper-connections", _STREAMS, MHC),
        "hyper_connections.ihc": About("mhc hyper-connections", _STREAMS, MHC),
    }
    methods = {
        "hyper-connections": Method(
            "Dynamic hyper-connections",
            "There are four residual streams. Attention and MLP read a sum of them, what they return is added to each, "
            "and the streams are mixed, by weights that depend on the token.",
            lambda n: {"hyper_connections": "dynamic"},
            (HYPER,),
        ),
        "mhc": Method(
            "Manifold-constrained hyper-connections (mHC)",
            "Hyper-connections whose weights are not negative, and whose mix of the streams is doubly stochastic, by "
            "20 of Sinkhorn's iterations.",
            lambda n: {"hyper_connections": "mhc"},
            (MHC, HYPER),
        ),
    }


@dataclass(kw_only=True, repr=False, eq=False)
class OwnFields:
    r"""Connections of classes that are no part of this package.

    Args:
        connections (`dict[str, dict]`, *optional*):
            Name of a class of connections -> values of its fields. The class has to be imported before the model is
            built.
    """

    connections: dict[str, dict[str, Any]] | None = None


@dataclass(kw_only=True, repr=False, eq=False)
class ConnectionFields(  # a dataclass has the fields of its last base first
    OwnFields,
    HyperConnectionFields,
    BackoutFields,
    EmbeddingResidualFields,
    MuddFields,
    AttnResFields,
    DeltaAttentionResidualFields,
    DepthAverageFields,
    NeutrenoFields,
    SharingFields,
    ValueEmbeddingFields,
    ValueResidualFields,
):
    """Connections that are added to a decoder. The defaults add none. Layers are counted from 0."""


ConnectionFields.__doc__ = f"{ConnectionFields.__doc__}\n\n    Args:\n" + "".join(
    textwrap.indent(cleandoc(each.__doc__ or "").partition("Args:\n")[2], "    ").rstrip() + "\n"
    for each in reversed(ConnectionFields.__bases__)
)


def check_connections(config: Any) -> None:
    """Refuses fields that do not fit together or the layers, and warns of those without effect."""
    depth_attention = config.value_residual == "depth_attention"
    for name in ("key_sources", "value_sources"):
        _check_sources(config, name)
    _check_layers(config, "value_residual_layers", 1)
    _check_layers(config, "value_embeddings", 0)
    init = config.value_residual_init
    if len(init) != 2 or not all(math.isfinite(value) for value in init):
        raise ValueError(f"`value_residual_init` is {init}: expected two finite numbers (on V_0, on V_n).")
    if depth_attention and value_sources(config) != list(range(config.num_hidden_layers)):
        raise ValueError(
            f"`value_residual` is 'depth_attention', which mixes the values of all layers, but `value_sources` is "
            f"{config.value_sources}. Share keys alone (`key_sources`), or choose another mode."
        )
    delta = "delta_attention_residual_blocks", config.delta_attention_residuals
    for name, is_on in (delta, ("attnres_blocks", config.attnres)):
        if is_on and (blocks := getattr(config, name)) and blocks > config.num_hidden_layers:
            raise ValueError(
                f"`{name}` is {blocks}: expected 1 to {config.num_hidden_layers} (`num_hidden_layers`), a block has a "
                "layer at least."
            )
    _warn_of_settings_without_effect(config)


def _check_sources(config: Any, name: str) -> None:
    sources, layers = getattr(config, name), config.num_hidden_layers
    if sources is None:
        return
    if len(sources) != layers:
        raise ValueError(f"`{name}` has {len(sources)} entries, but `num_hidden_layers` is {layers}.")
    kinds = getattr(config, "layer_types", None)
    rope = getattr(config, "no_rope_layers", None) if name == "key_sources" else None
    for reader, source in enumerate(sources):
        where = f"`{name}`[{reader}] is {source}"
        if not 0 <= source <= reader:
            raise ValueError(f"{where}: a source comes no later than its reader, expected 0 to {reader}.")
        if sources[source] != source:
            raise ValueError(f"{where}, but `{name}`[{source}] is {sources[source]}: a source must be its own source.")
        if kinds is not None and kinds[source] != kinds[reader]:
            raise ValueError(
                f"{where}, but `layer_types` differ: {kinds[source]!r} in layer {source}, {kinds[reader]!r} in layer "
                f"{reader}. Share within one layer type."
            )
        if rope and rope[source] != rope[reader]:
            raise ValueError(
                f"{where}, but `no_rope_layers` differ: {rope[source]} in layer {source}, {rope[reader]} in layer "
                f"{reader}. Rotated queries need rotated keys."
            )


def _check_layers(config: Any, name: str, first: int) -> None:
    layers, sources = getattr(config, name) or [], value_sources(config)
    if layers != sorted(set(layers)) or not all(first <= layer < config.num_hidden_layers for layer in layers):
        raise ValueError(
            f"`{name}` is {layers}: expected ascending layers from {first} to {config.num_hidden_layers - 1} "
            "(`num_hidden_layers` - 1), each once."
        )
    for layer in layers:
        if sources[layer] != layer:
            raise ValueError(
                f"`{name}` holds {layer}, but `value_sources`[{layer}] is {sources[layer]}: that layer has no "
                "values of its own."
            )


def _warn_of_settings_without_effect(config: Any) -> None:
    from transformers.utils import logging  # here: `resformer methods` does without Transformers

    mode = f"`value_residual` is {config.value_residual!r}"
    depth_attention = config.value_residual == "depth_attention"
    embeddings = config.value_embeddings, f"`value_embeddings` is {config.value_embeddings}"
    period = f"`dwa_period` ({config.dwa_period}) is above `num_hidden_layers` ({config.num_hidden_layers})"
    delta = "`delta_attention_residuals`"
    for name, default, used, reason in (
        ("value_residual", "none", mixing_layers(config), "no layer has earlier values, and its own, to mix"),
        ("neutreno_lambda", 0.0, any(value_sources(config)), "all layers attend to the values of the first"),
        ("value_residual_layers", None, config.value_residual != "none", mode),
        ("depth_attention_stride", 1, depth_attention, mode),
        ("depth_attention_init", 1.0, depth_attention, mode),
        ("value_embeddings_init", None, *embeddings),
        ("value_embeddings_gate_channels", 12, *embeddings),
        ("value_embeddings_gate_limit", 3.0, *embeddings),
        ("dwa", False, config.dwa_period <= config.num_hidden_layers, period),
        ("dwa_dilation", 1, config.dwa, "`dwa` is False"),
        ("dwa_period", 1, config.dwa, "`dwa` is False"),
        ("attnres_blocks", None, config.attnres, "`attnres` is False"),
        ("delta_attention_residual_blocks", 8, config.delta_attention_residuals, f"{delta} is False"),
        ("mudd_channels", "qkvr", config.mudd, "`mudd` is False"),
        ("mudd_norm", False, config.mudd, "`mudd` is False"),
        ("hyper_streams", 4, config.hyper_connections != "none", "`hyper_connections` is 'none'"),
    ):
        if (value := getattr(config, name)) != default and not used:
            logging.get_logger(__name__).warning_once(f"`{name}`={value!r} changes nothing: {reason}.")
