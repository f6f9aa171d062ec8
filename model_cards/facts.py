"""What is known of each named method: equation, cost, published results, limits, papers. Numbers are the papers'.

Layers are counted n = 0..N-1. V_n are the raw values of layer n, X_0 the embeddings, X_{n+1} the output of block n.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FACTS", "PAPERS", "MethodFacts", "Paper", "Published", "papers_of"]


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited."""

    arxiv: str
    key: str
    title: str
    authors: str
    year: int
    venue: str | None = None

    @property
    def bibtex(self) -> str:
        kind, place = ("inproceedings", f"booktitle = {{{self.venue}}}") if self.venue else ("misc", "")
        fields = [f"title = {{{self.title}}}", f"author = {{{self.authors}}}", f"year = {{{self.year}}}", place]
        fields += [f"eprint = {{{self.arxiv}}}", "archivePrefix = {arXiv}"]
        return f"@{kind}{{{self.key},\n" + ",\n".join(f"  {line}" for line in fields if line) + "\n}"


PAPERS = {
    "llama": Paper(
        "2302.13971",
        "touvron2023llama",
        "{LLaMA}: Open and Efficient Foundation Language Models",
        "Touvron, Hugo and others",
        2023,
    ),
    "resformer": Paper(
        "2410.17897",
        "zhou2025value",
        "Value Residual Learning",
        "Zhou, Zhanchao and Wu, Tianyi and Jiang, Zhiyun and Obeid, Fares and Lan, Zhenzhong",
        2025,
        "Proceedings of the 63rd Annual Meeting of the Association for Computational Linguistics",
    ),
    "neutreno": Paper(
        "2312.00751",
        "nguyen2023mitigating",
        "Mitigating Over-smoothing in Transformers via Regularized Nonlocal Functionals",
        "Nguyen, Tam and Nguyen, Tan M. and Baraniuk, Richard G.",
        2023,
        "Advances in Neural Information Processing Systems",
    ),
    "denseformer": Paper(
        "2402.02622",
        "pagliardini2024denseformer",
        "{DenseFormer}: Enhancing Information Flow in Transformers via Depth Weighted Averaging",
        "Pagliardini, Matteo and Mohtashami, Amirkeivan and Fleuret, Fran{\\c{c}}ois and Jaggi, Martin",
        2024,
        "Advances in Neural Information Processing Systems",
    ),
    "cla": Paper(
        "2405.12981",
        "brandon2024reducing",
        "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
        "Brandon, William and Mishra, Mayank and Nrusimha, Aniruddha and Panda, Rameswar and Ragan-Kelley, Jonathan",
        2024,
        "Advances in Neural Information Processing Systems",
    ),
    "fusedkv": Paper(
        "2512.03870",
        "lin2026reconstructing",
        "Reconstructing {KV} Caches with Cross-Layer Fusion for Enhanced Transformers",
        "Lin, Hongzhan and Bai, Zhiqi and Zhang, Xinmiao and Yang, Sen and Li, Xiang and Yang, Siran and Xu, Yunlong "
        "and Liu, Jiaheng and Zhao, Yongchi and Wang, Jiamang and Xu, Yuchi and Su, Wenbo and Zheng, Bo",
        2026,
        "International Conference on Learning Representations",
    ),
}


@dataclass(frozen=True)
class Published:
    """One published comparison with a plain Transformer of the same size."""

    setting: str
    transformer: str
    method: str
    source: str
    secondhand: bool = False  # from summaries of the paper, not its text


@dataclass(frozen=True)
class MethodFacts:
    """One method. `count(N, d, heads, d_kv)` is the number of parameters added to plain Llama, as `parameters` says."""

    title: str
    summary: str
    equation: str  # LaTeX
    use: str
    avoid: str
    parameters: str
    count: Callable[[int, int, int, int], int]
    cache: str  # share of the full key/value cache
    exact: bool  # whether a retrofit can start as the source
    limits: str
    papers: Sequence[str]
    published: Sequence[Published] = ()
    remarks: Sequence[str] = ()


_MODDED = "modded-nanogpt speed run, validation loss"
_LOSS = "validation loss, SlimPajama, 20B tokens"
_TABLE = "468M, WikiText perplexity / mean accuracy of tasks, %"


def _large(method: str) -> Published:
    """The 468M comparison of v5 of the ResFormer paper."""
    return Published(_TABLE, "24.8 / 40.6", method, "resformer", secondhand=True)


def _loss_82m(value: str) -> Published:
    return Published(f"82M, {_LOSS}", "2.739", value, "resformer", secondhand=True)


def _none(layers: int, width: int, heads: int, values: int) -> int:
    return 0


def _averages(layers: int, dilation: int, period: int) -> int:
    return sum(block // dilation + 1 for block in range(period, layers + 1, period))


_FIXED = "Fixed coefficients change what a trained model computes, so a retrofit needs --lossy and training."
_MIX = r"V'_n = \lambda_{1,n} V_0 + \lambda_{2,n} V_n, \qquad U_n = A_n V'_n \qquad (n \ge 1)"
_SERVING = "Serving engines whose key/value sharing is all or nothing cannot share values alone."
_GAIN = "The papers' gains come from pre-training: after a short fine-tune expect little."

FACTS: dict[str, MethodFacts] = {
    "transformer": MethodFacts(
        title="Transformer (plain Llama)",
        summary="The baseline: a Llama decoder without any cross-layer connection, bit for bit.",
        equation="U_n = A_n V_n",
        use="As the baseline of a comparison, in the same code as the methods it is compared with.",
        avoid="For anything else, transformers' own LlamaForCausalLM is the same model.",
        parameters="0",
        count=_none,
        cache="1",
        exact=True,
        limits="Those of Llama.",
        papers=("llama",),
    ),
    "resformer": MethodFacts(
        title="ResFormer (learnable value residual)",
        summary="Each layer after the first attends to a learned mix of its own values and those of layer 0.",
        equation=_MIX + r", \qquad \lambda_{1,n}, \lambda_{2,n} \text{ learned}",
        use="The first method to try, from scratch or on a trained checkpoint: two numbers a layer, no cost in speed "
        "or cache, and a retrofit starts as the source.",
        avoid="To save memory: the cache keeps its size. For small-data encoders, where a value residual is reported "
        "to hurt.",
        parameters="2 (N - 1)",
        count=lambda layers, width, heads, values: 2 * (layers - 1),
        cache="1",
        exact=True,
        limits=_GAIN,
        papers=("resformer",),
        published=(
            _loss_82m("2.705"),
            _large("23.7 / 42.3"),
            Published(_MODDED, "3.3274", "3.3065", "independent"),
        ),
        remarks=(
            "The abstract's headline: the Transformer's loss with 16.11 % fewer parameters and 20.3 % less data.",
            "The start at 0.5, 0.5 when training from scratch is as reported in secondary summaries of the paper.",
            "A residual on queries, keys, the attention matrix or the hidden state does not help (82M validation loss "
            "2.742, 2.746, 2.757, 2.781 against 2.739 for the baseline).",
        ),
    ),
    "resformer-identity": MethodFacts(
        title="Identity-ResFormer",
        summary="Each layer after the first attends to the mean of its own values and those of layer 0; nothing to "
        "learn.",
        equation=r"V'_n = \tfrac{1}{2} V_0 + \tfrac{1}{2} V_n, \qquad U_n = A_n V'_n \qquad (n \ge 1)",
        use="From scratch, where a method without any parameter or setting is wanted.",
        avoid="As a retrofit: use resformer, which can start as the source.",
        parameters="0",
        count=_none,
        cache="1",
        exact=False,
        limits=_FIXED,
        papers=("resformer",),
        published=(
            Published(f"82M, {_LOSS}", "2.7389", "2.7117", "resformer"),
            Published(f"180M, {_LOSS}", "2.5015", "2.4692", "resformer"),
            Published(f"468M, {_LOSS}", "2.2806", "2.2537", "resformer"),
            _large("23.8 / 41.3"),
            Published(_MODDED, "3.3274", "3.3151", "independent"),
        ),
    ),
    "resformer-constant": MethodFacts(
        title="Constant-ResFormer",
        summary="Identity-ResFormer with other fixed coefficients: twice the values of layer 0 on top of the layer's "
        "own.",
        equation=r"V'_n = 2 V_0 + V_n, \qquad U_n = A_n V'_n \qquad (n \ge 1)",
        use="From scratch, without parameters: better than 0.5, 0.5 in the paper. `value_residual_init` sets others.",
        avoid="As a retrofit: use resformer, which can start as the source.",
        parameters="0",
        count=_none,
        cache="1",
        exact=False,
        limits=_FIXED,
        papers=("resformer",),
        published=(_loss_82m("2.700"),),
        remarks=("The paper swept the coefficient on V_0 from 0.2 to 5: all beat the baseline.",),
    ),
    "resformer-plus": MethodFacts(
        title="ResFormer-Plus",
        summary="The coefficients on layer 0's values compete: a softmax over the layers shares out one learned scale.",
        equation=r"V'_n = s \, \mathrm{softmax}(z)_n V_0 + \lambda_{2,n} V_n, \qquad U_n = A_n V'_n \qquad (n \ge 1)",
        use="From scratch, for the best perplexity of the family in the paper.",
        avoid="Where one wants to read each layer's coefficient off by itself: resformer's are independent.",
        parameters="2 (N - 1) + 1",
        count=lambda layers, width, heads, values: 2 * (layers - 1) + 1,
        cache="1",
        exact=True,
        limits="The paper's start of z is not public; ours is z = 0. In a retrofit s = 0, so s learns first, then z. "
        + _GAIN,
        papers=("resformer",),
        published=(_loss_82m("2.681"), _large("23.2 / 42.0")),
        remarks=("That deeper layers end up with more of V_0 is as reported in secondary summaries.",),
    ),
    "resformer-sparse": MethodFacts(
        title="Sparse-ResFormer",
        summary="A constant value residual in the last third of the layers alone, with a large coefficient on layer 0.",
        equation=r"V'_n = 5 V_0 + V_n, \qquad U_n = A_n V'_n \qquad (n \ge N - \lceil N / 3 \rceil,\ n \ge 1)",
        use="From scratch, without parameters, to see how few layers need the residual.",
        avoid="As a retrofit: use resformer, which can start as the source.",
        parameters="0",
        count=_none,
        cache="1",
        exact=False,
        limits=_FIXED
        + " The paper's 8 layers are generalised to the last third; sources disagree on the coefficient on V_n (1 or "
        "0.5), `value_residual_init` sets it.",
        papers=("resformer",),
        published=(_loss_82m("2.687"),),
        remarks=("The coefficient 5 and the last three of 8 layers are as reported in secondary summaries.",),
    ),
    "resformer-dense": MethodFacts(
        title="Dense-ResFormer",
        summary="Each layer attends to a learned mix of the values of all layers up to it.",
        equation=r"V'_n = \sum_{m=0}^{n} \lambda_{n,m} V_m, \qquad U_n = A_n V'_n \qquad (n \ge 1)",
        use="To study which layers' values are wanted where: the mixing matrix is read off directly.",
        avoid="For quality alone: in the paper layer 0's values by themselves beat those of all previous layers.",
        parameters="N (N + 1) / 2 - 1",
        count=lambda layers, width, heads, values: layers * (layers + 1) // 2 - 1,
        cache="1",
        exact=True,
        limits="All layers' values of the current tokens stay in memory until the last layer has mixed them. " + _GAIN,
        papers=("resformer",),
    ),
    "resformer-gated": MethodFacts(
        title="Gated ResFormer",
        summary="The coefficient on layer 0's values depends on the token and on the key/value head. Ours, after "
        "RWKV-7 and x-transformers; no paper describes it.",
        equation=r"V'_n = \left(a + \tanh(W_n H_n)\right) V_0 + \lambda_{2,n} V_n, \qquad U_n = A_n V'_n \qquad (n "
        r"\ge 1)",
        use="Where one number a layer is too blunt: it starts as resformer and can tell tokens apart.",
        avoid="Where the mix must be readable: it has no fixed matrix (NaN where the gate decides).",
        parameters="(N - 1) (d g + 1), g key/value heads",
        count=lambda layers, width, heads, values: (layers - 1) * (width * heads + 1),
        cache="1",
        exact=True,
        limits="No published results: nobody has compared it at scale.",
        papers=("resformer",),
    ),
    "neutreno": MethodFacts(
        title="NeuTRENO",
        summary="Adds to each layer's attention output how far layer 0's values are from its own, against "
        "over-smoothing.",
        equation=r"U_n = A_n V_n + \lambda \left(V_0 - V_n\right), \qquad \lambda = 0.4 \qquad (n \ge 1)",
        use="From scratch, to compare with value residuals: the term is added after attention, not before it.",
        avoid="As a retrofit: the fixed term changes a trained model.",
        parameters="0",
        count=_none,
        cache="1",
        exact=False,
        limits="The term is not learned; 0.4 is for language models, 0.6 for vision. The ResFormer paper finds "
        "value-state drains and hidden-state peaks with it as without. Needs --lossy and training as a retrofit.",
        papers=("neutreno",),
        published=(_large("24.3 / 41.4"),),
    ),
    "resformer-neutreno": MethodFacts(
        title="ResFormer with NeuTRENO",
        summary="Identity-ResFormer, with NeuTRENO's term on the already mixed values.",
        equation=r"V'_n = \tfrac{1}{2} V_0 + \tfrac{1}{2} V_n, \qquad "
        r"U_n = A_n V'_n + 0.2 \left(V_0 - V'_n\right) \qquad (n \ge 1)",
        use="From scratch, to see whether the two add up.",
        avoid="As a retrofit: use resformer, which can start as the source.",
        parameters="0",
        count=_none,
        cache="1",
        exact=False,
        limits=_FIXED,
        papers=("resformer", "neutreno"),
    ),
    "svformer": MethodFacts(
        title="SVFormer",
        summary="Every layer attends to the values of layer 0; there is one value projection and one value cache.",
        equation="U_n = A_n V_0",
        use="From scratch, where the cache is what limits: long sequences, many at a time. Half of it is gone, and it "
        "combines with grouped heads.",
        avoid="For short sequences at equal size, where GQA with groups of 2 is better in the paper; as a retrofit, "
        "unless there is training to repair it.",
        parameters="-(N - 1) d d_kv",
        count=lambda layers, width, heads, values: -(layers - 1) * width * values,
        cache="(N + 1) / (2 N)",
        exact=False,
        limits="Never the source's function as a retrofit: needs --lossy and much training. Smaller "
        "learning rates help. " + _SERVING,
        papers=("resformer",),
        remarks=(
            "In the paper it loses to full attention and to GQA2 at 2,048 tokens, beats GQA2 and CLA2 at 64k, and "
            "needs 12.2 % more parameters for the Transformer's loss.",
        ),
    ),
    "denseformer": MethodFacts(
        title="DenseFormer (1x1)",
        summary="After each block the stream is a learned average of the embeddings and of all blocks' outputs so far.",
        equation=r"Y_n = \sum_{j=0}^{n+1} \alpha_{n,j} X_j, \qquad X_{n+1} = B_n(Y_{n-1}), \qquad Y_{-1} = X_0",
        use="For quality at a given depth; on a trained checkpoint, where it starts as the source.",
        avoid="Where training speed counts: the average over all states is read and written at every block; 4x5 is "
        "faster.",
        parameters="N (N + 3) / 2",
        count=lambda layers, width, heads, values: _averages(layers, 1, 1),
        cache="1",
        exact=True,
        limits="All blocks' outputs of the current tokens stay in memory. Its weights are not decayed here, since "
        "that would pull the diagonal from 1; the paper's runs do decay them.",
        papers=("denseformer",),
        published=(
            Published("48 layers, OpenWebText2 perplexity", "18.61", "17.84", "denseformer"),
            Published("48 layers, batches per second", "5.94", "4.65", "denseformer"),
            _large("24.0 / 40.8"),
        ),
        remarks=(
            "Counter-evidence: a 2026 ablation (Attention Residuals) finds DenseFormer no better than its baseline "
            "(loss 1.767 against 1.766).",
            "A plain Transformer of 72 layers reaches 17.82 at 4.08 batches per second in the same comparison.",
        ),
    ),
    "denseformer-4x5": MethodFacts(
        title="DenseFormer 4x5",
        summary="DenseFormer after every fifth block, over every fourth output: most of the gain, little of the cost.",
        equation=r"Y_n = \sum_{j \le n+1,\ j \equiv n+1 \,(\mathrm{mod}\, 4)} \alpha_{n,j} X_j "
        r"\text{ if } 5 \text{ divides } n+1, \text{ else } Y_n = X_{n+1}",
        use="The paper's recommendation for deep models, from scratch or as a retrofit.",
        avoid="For models of few layers, which have few averages then; other periods can be set (`dwa_dilation`, "
        "`dwa_period`), equal ones are bad.",
        parameters="sum of floor(i / 4) + 1 over i = 5, 10, ... up to N",
        count=lambda layers, width, heads, values: _averages(layers, 4, 5),
        cache="1",
        exact=True,
        limits="Under 5 layers it does nothing. Some blocks' outputs of the current tokens stay in memory.",
        papers=("denseformer",),
        published=(
            Published("48 layers, OpenWebText2 perplexity", "18.61", "17.87", "denseformer"),
            Published("48 layers, batches per second", "5.94", "5.72", "denseformer"),
        ),
    ),
    "cla2": MethodFacts(
        title="CLA2 (cross-layer attention)",
        summary="Pairs of layers share the keys and values of the first of the two.",
        equation=r"U_n = \mathrm{attention}(Q_n, K_{s(n)}) \, V_{s(n)}, \qquad s(n) = 2 \lfloor n / 2 \rfloor",
        use="From scratch, to halve the cache on top of grouped heads, in the form that ready-made key/value sharing "
        "has.",
        avoid="As a retrofit, unless there is training to repair it.",
        parameters="-2 floor(N / 2) d d_kv",
        count=lambda layers, width, heads, values: -2 * (layers // 2) * width * values,
        cache="ceil(N / 2) / N",
        exact=False,
        limits="Never the source's function as a retrofit: needs --lossy and much training. FusedKV's authors find "
        "that sharing across layers typically stays behind grouping heads within one.",
        papers=("cla",),
        remarks=(
            "The abstract: on top of multi-query attention, another halving of the cache at nearly its accuracy, in "
            "models trained from scratch.",
        ),
    ),
    "fusedkv-lite": MethodFacts(
        title="FusedKV-Lite",
        summary="The upper half of the layers reads the values of layer 0 and the keys of the lower half's last layer.",
        equation=r"U_n = \mathrm{attention}(Q_n, K_{h-1}) \, V_0 \quad (n \ge h = \lfloor N / 2 \rfloor), \qquad "
        r"U_n = A_n V_n \text{ below}",
        use="From scratch, to halve the cache with keys and values from where the upper layers want them.",
        avoid="As a retrofit, unless there is training to repair it.",
        parameters="-2 (N - floor(N / 2)) d d_kv",
        count=lambda layers, width, heads, values: -2 * (layers - layers // 2) * width * values,
        cache="floor(N / 2) / N",
        exact=False,
        limits="Never the source's function as a retrofit: needs --lossy and much training. Keys and values of "
        "different layers fit no engine that shares both from one.",
        papers=("fusedkv",),
        remarks=(
            "The abstract: from 332M to 4B parameters FusedKV halves the cache at a lower validation perplexity than "
            "the Transformer; the Lite form is slightly worse than FusedKV and moves less data.",
        ),
    ),
    "resformer-denseformer": MethodFacts(
        title="ResFormer with DenseFormer",
        summary="Learned value residuals and depth-weighted averaging together: one connects values, the other the "
        "stream.",
        equation=_MIX + r" \\ Y_n = \sum_{j=0}^{n+1} \alpha_{n,j} X_j",
        use="On a trained checkpoint, to let training choose which connection it wants: both start as the source.",
        avoid="Where one needs to know which of the two helped: compare with each alone.",
        parameters="2 (N - 1) + N (N + 3) / 2",
        count=lambda layers, width, heads, values: 2 * (layers - 1) + _averages(layers, 1, 1),
        cache="1",
        exact=True,
        limits="As of DenseFormer. No published results: nobody has compared the combination at scale.",
        papers=("resformer", "denseformer"),
    ),
}


def papers_of(method: str | None, fields: Mapping[str, Any]) -> list[Paper]:
    """The papers behind a method and the connection fields that are set beside it."""
    found = list(FACTS[method].papers) if method in FACTS else []
    shares_values = fields.get("value_sources") is not None and fields.get("key_sources") is None
    for applies, paper in (
        (fields.get("value_residual", "none") != "none" or shares_values, "resformer"),
        (fields.get("neutreno_lambda"), "neutreno"),
        (fields.get("dwa"), "denseformer"),
        (fields.get("key_sources") is not None and method != "fusedkv-lite", "cla"),
    ):
        if applies and paper not in found:
            found.append(paper)
    return [PAPERS[name] for name in found]
