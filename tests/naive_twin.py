"""The decoder once more: float64, one sequence, one head and one sum at a time, straight from the equations.

    V'_n = sum_{m<=n} M[n, m] V_m
    Y_n  = sum_{j<=n+1} D[n, j] X_j
    U_n  = A_n V'_{s(n)} + l (V_0 - V'_{s(n)})
    h_i  = x_i + g_i concat_h sum_b a_ib^h D_b^h
    h_i  = sum_j softmax_j(w_i . RMSNorm(b_j)) b_j
    X^c_i = sum_{j<=i} A^c_ij X_j,  c = Q, K, V, R
    H'   = R H + b f(p H)

V'_n = V_n + g (V~_n - V_n) for Depth-Attention. It reads a state dict by Llama's names and the two matrices, and shares
no code with `resformer.modeling`. Gradients go through it, to the weights and to both matrices.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from resformer import ResFormerConfig

Weights = Mapping[str, torch.Tensor]


def naive_logits(
    config: ResFormerConfig,
    weights: Weights,
    value_mixing: torch.Tensor,
    depth_mixing: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Returns the logits of each sequence's real tokens, `(real tokens, vocab_size)`, padding left out.

    Args:
        weights: the state dict of a `ResFormerForCausalLM`, in float64.
        value_mixing: M, `(N, N)`, in float64.
        depth_mixing: D, `(N, N + 1)`, in float64.
        input_ids, attention_mask: `(batch, tokens)`; 0 in the mask is padding, on either side.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = []
    for ids, mask in zip(input_ids, attention_mask, strict=True):
        hidden = naive_hidden_states(config, weights, value_mixing, depth_mixing, ids[mask.bool()].tolist())
        logits.append(hidden @ head.T)
    return logits


def naive_hidden_states(
    config: ResFormerConfig,
    weights: Weights,
    value_mixing: torch.Tensor,
    depth_mixing: torch.Tensor,
    tokens: Sequence[int],
) -> torch.Tensor:
    """Returns the normed output, `(tokens, hidden_size)`, for one sequence without padding."""
    number_of_layers = config.num_hidden_layers
    value_source = config.value_sources or list(range(number_of_layers))
    key_source = config.key_sources or list(range(number_of_layers))
    query_heads, groups = config.num_attention_heads, config.num_key_value_heads
    epsilon = config.rms_norm_eps

    embeddings = weights["model.embed_tokens.weight"][list(tokens)]
    blocks = [embeddings]  # X_j
    stream = blocks[0]  # Y_{n-1}
    keys: dict[int, list[torch.Tensor]] = {}  # layer -> one (tokens, head_dim) per key/value head
    unrotated: dict[int, list[torch.Tensor]] = {}  # the same keys before the rotary embedding
    raw: dict[int, list[torch.Tensor]] = {}  # V_m, likewise
    mixed: dict[int, list[torch.Tensor]] = {}  # V'_m, likewise
    made: list[torch.Tensor] = []  # X_i of dense connections: the stream that other connections hand on
    boundaries = []  # the stream at the start of each block of depth attention
    lanes, alone = [stream] * config.hyper_streams, stream  # H, and its mean

    for n in range(number_of_layers):
        layer = f"model.layers.{n}"
        depth_blocks = config.delta_attention_residual_blocks
        if n in [block * number_of_layers // depth_blocks for block in range(depth_blocks)]:
            boundaries.append(stream)
        if config.embedding_residual:
            r, s = weights[f"{layer}.embedding_residual.weight"]
            stream = r * stream + s * blocks[0]
        made.append(stream)
        of_channel = {channel: dense_sum(config, weights, made, channel) for channel in "qkvr"}
        stream = of_channel["r"]
        lanes = [lane + stream - alone for lane in lanes]
        if n == 0:
            sources = [stream]  # b_j of Attention Residuals
        seen = with_deltas(config, weights, 2 * n, stream, boundaries)
        if n:
            seen = over_sources(config, weights, 2 * n, seen, sources)
        seen, lanes, gains = read_of_lanes(config, weights, 2 * n, lanes, seen, stream)
        scale = weights[f"{layer}.input_layernorm.weight"]
        normed_of = {c: rms_norm(seen + each - stream, scale, epsilon) for c, each in of_channel.items()}  # H_n
        normed = normed_of["r"]

        queries = heads(linear(normed_of["q"], weights, f"{layer}.self_attn.q_proj"), query_heads)
        plain_queries = queries
        queries = [rotate(query, config.rope_parameters["rope_theta"]) for query in queries]

        if key_source[n] == n:
            own = heads(linear(normed_of["k"], weights, f"{layer}.self_attn.k_proj"), groups)
            unrotated[n] = own
            keys[n] = [rotate(key, config.rope_parameters["rope_theta"]) for key in own]

        if value_source[n] == n:
            raw[n] = heads(linear(normed_of["v"], weights, f"{layer}.self_attn.v_proj"), groups)
            if n in (config.value_embeddings or ()):
                table = weights[f"{layer}.value_embedding.table.weight"]
                gates = weights[f"{layer}.value_embedding.gate.weight"]
                rows = heads(torch.stack([table[token] for token in tokens]), groups)
                for head in range(groups):
                    read = normed[:, : config.value_embeddings_gate_channels] @ gates[head]
                    size = config.value_embeddings_gate_limit / (1 + torch.exp(-read))
                    raw[n][head] = raw[n][head] + size[:, None] * rows[head]
            mixed[n] = [torch.zeros_like(value) for value in raw[n]]
            if config.value_residual == "depth_attention":
                mixed[n] = [
                    over_depth(
                        sum(plain_queries[head * (query_heads // groups) : (head + 1) * (query_heads // groups)])
                        / (query_heads // groups),
                        {m: unrotated[key_source[m]][head] for m in range(n + 1)},
                        {m: mixed[m][head] for m in range(n)} | {n: raw[n][head]},
                        depth_gate(config, weights, n, head),
                        config.depth_attention_stride,
                    )
                    for head in range(groups)
                ]
            for m in range(n + 1) if config.value_residual != "depth_attention" else ():
                if m not in raw:
                    assert value_mixing[n, m] == 0, f"M[{n}, {m}] is not 0, but layer {m} has no values"
                    continue
                for head in range(groups):
                    weight = value_mixing[n, m]
                    if weight.isnan():
                        assert config.value_residual == "gated"
                        assert m == 0
                        gate = weights[f"{layer}.value_residual.gate.weight"][head]
                        weight = (config.value_residual_init[0] + torch.tanh(normed @ gate))[:, None]  # one per token
                    mixed[n][head] = mixed[n][head] + weight * raw[m][head]

        outputs = []
        for head in range(query_heads):
            group = head // (query_heads // groups)
            value = mixed[value_source[n]][group]
            output = attend(queries[head], keys[key_source[n]][group], value)
            if n >= 1:
                output = output + config.neutreno_lambda * (raw[0][group] - value)
            outputs.append(output)
        added = linear(torch.cat(outputs, dim=-1), weights, f"{layer}.self_attn.o_proj")
        stream, lanes = stream + added, [lane + gain * added for lane, gain in zip(lanes, gains, strict=True)]

        parts = config.attnres_blocks
        if parts is None or n in [part * number_of_layers // parts for part in range(parts)]:
            sources = [*sources, added]
        else:
            sources = [*sources[:-1], sources[-1] + added]
        seen = with_deltas(config, weights, 2 * n + 1, stream, boundaries)
        seen = over_sources(config, weights, 2 * n + 1, seen, sources)
        seen, lanes, gains = read_of_lanes(config, weights, 2 * n + 1, lanes, seen, stream)
        normed = rms_norm(seen, weights[f"{layer}.post_attention_layernorm.weight"], epsilon)
        gate = linear(normed, weights, f"{layer}.mlp.gate_proj")
        inner = gate * torch.sigmoid(gate) * linear(normed, weights, f"{layer}.mlp.up_proj")
        added = linear(inner, weights, f"{layer}.mlp.down_proj")
        lanes = [lane + gain * added for lane, gain in zip(lanes, gains, strict=True)]
        alone = sum(lanes) / len(lanes)
        blocks.append(alone)

        sources = [*sources, added] if parts is None else [*sources[:-1], sources[-1] + added]
        if n == number_of_layers - 1:
            mixed_over = over_sources(config, weights, 2 * n + 2, stream + added, sources)
            blocks[-1] = alone + mixed_over - (stream + added)
        if config.backout and n == number_of_layers - 1:
            taken = weights[f"{layer}.backout.weight"] * blocks[number_of_layers // 2 + 1]
            blocks[-1] = blocks[-1] - taken
        stream = torch.zeros_like(blocks[0])
        for j in range(n + 2):
            stream = stream + depth_mixing[n, j] * blocks[j]

    made.append(stream)
    return rms_norm(dense_sum(config, weights, made, "r"), weights["model.norm.weight"], epsilon)


def dense_sum(config: ResFormerConfig, weights: Weights, made: Sequence[torch.Tensor], channel: str) -> torch.Tensor:
    """X^c_i of MUDDFormer, one token, source and number of the generator at a time. Without a channel it is R's."""
    i, newest = len(made) - 1, made[-1]
    channels = "".join(each for each in "qkvr" if each in config.mudd_channels)
    if i == config.num_hidden_layers:
        channels = "r" if "r" in channels else ""
    elif config.key_sources and config.key_sources[i] != i:
        channels = channels.replace("k", "")
    if i < config.num_hidden_layers and config.value_sources and config.value_sources[i] != i:
        channels = channels.replace("v", "")
    if channel not in channels and channel != "r":
        return dense_sum(config, weights, made, "r")
    if not config.mudd or i == 0 or channel not in channels:
        return newest
    own = {name: weights.get(f"model.layers.{i - 1}.mudd.{name}") for name in ("first", "second", "static", "post")}
    scales = [weights.get(f"model.layers.{max(j - 1, 0)}.mudd.pre") for j in range(i + 1)]
    place, ones = channels.index(channel), torch.ones_like(newest[0])
    rows = []
    for t in range(len(newest)):
        hidden = own["first"] @ rms_norm(newest[t], ones, config.rms_norm_eps)
        hidden = hidden / 2 * (1 + torch.erf(hidden / math.sqrt(2)))
        total = torch.zeros_like(newest[t])
        for j in range(i + 1):
            weight = own["second"][place * (i + 1) + j] @ hidden + own["static"][place, j]
            if config.mudd_norm:
                scale = scales[j][0 if j == 0 else len(scales[j]) - 1]
                total = total + weight * rms_norm(made[j][t], scale, config.rms_norm_eps)
            else:
                total = total + (weight + (j == i)) * made[j][t]  # the paper's a_ii is 1 more
        if config.mudd_norm and channel == "r":
            total = rms_norm(total, own["post"][0], config.rms_norm_eps)
        rows.append(newest[t] + total if config.mudd_norm else total)
    return torch.stack(rows)


def with_deltas(
    config: ResFormerConfig, weights: Weights, i: int, stream: torch.Tensor, boundaries: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What sublayer i reads: the stream, and the deltas of the blocks that have ended, one token and head at a time."""
    if not config.delta_attention_residuals:
        return stream
    query, gate = (
        weights[f"model.layers.{i // 2}.delta_attention_residuals.{name}"][i % 2] for name in ("query", "gate")
    )
    deltas = [boundaries[0], *(boundaries[b] - boundaries[b - 1] for b in range(1, len(boundaries)))]
    number = math.gcd(config.num_key_value_heads, config.hidden_size)
    rows = []
    for t in range(len(stream)):
        slices = []
        for head in range(number):
            total = torch.ones((), dtype=torch.float64)  # of the null source
            read = torch.zeros(config.hidden_size // number, dtype=torch.float64)
            for delta in deltas:
                normed = rms_norm(delta[t], torch.ones_like(delta[t]), config.rms_norm_eps)
                exponential = torch.exp(query.chunk(number)[head] @ normed.chunk(number)[head])
                total = total + exponential
                read = read + exponential * delta[t].chunk(number)[head]
            slices.append(read / total)
        rows.append(stream[t] + gate * torch.cat(slices))
    return torch.stack(rows)


def read_of_lanes(
    config: ResFormerConfig,
    weights: Weights,
    i: int,
    lanes: Sequence[torch.Tensor],
    seen: torch.Tensor,
    stream: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(what sublayer i reads, R H, b), one token at a time; what others add to the stream there, each lane has."""
    form, n = config.hyper_connections, len(lanes)
    if form == "none":
        return seen, list(lanes), [torch.ones(())] * n
    name = f"model.layers.{i // 2}.hyper_connections"
    static = weights[f"{name}.static"][i % 2]
    if form != "static":
        weight, scale = weights[f"{name}.weight"][i % 2], weights[f"{name}.scale"][i % 2]
    read, mixed, gains = [], [[] for _ in lanes], [[] for _ in lanes]
    for t in range(len(seen)):
        beside = seen[t] - stream[t]
        h = torch.stack([lane[t] + beside for lane in lanes])  # (n, hidden_size)
        whole = h if form == "dynamic" else h.flatten()
        if form != "static":
            whole = whole / (whole.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        m, c, a = static[:n], static[n : 2 * n], static[2 * n :]
        if form in ("static", "dynamic"):
            p, b, transposed = m, c, a.view(n, n).T  # A_m, B and A_r of the paper
            if form == "dynamic":
                p = p + scale[0] * torch.tanh(whole @ weight[0])
                b = b + scale[1] * torch.tanh(whole @ weight[1])
                transposed = transposed + scale[0] * torch.tanh(whole @ weight[2:].T)
            r = transposed.T
        else:
            own = torch.full((n,), 0.3 / (n - 1), dtype=torch.float64)
            own[i % n] = 0.7
            p = torch.sigmoid(torch.logit(own) + m + scale[0] * (weight[:n] @ whole))
            b = 2 * torch.sigmoid(c + scale[1] * (weight[n : 2 * n] @ whole))
            r = torch.eye(n, dtype=torch.float64)
            if form == "mhc":
                r = torch.exp((a + scale[2] * (weight[2 * n :] @ whole)).view(n, n))
                for _ in range(20):
                    r = r / r.sum(0, keepdim=True)
                    r = r / r.sum(1, keepdim=True)
        read.append(p @ h)
        for k in range(n):
            mixed[k].append(r[k] @ h - beside)
            gains[k].append(b[k])
    return torch.stack(read), [torch.stack(each) for each in mixed], [torch.stack(each)[:, None] for each in gains]


def over_sources(
    config: ResFormerConfig, weights: Weights, i: int, stream: torch.Tensor, sources: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What sublayer i, or the final norm, reads with Attention Residuals, one token at a time."""
    if not config.attnres:
        return stream
    layer = min(i // 2, config.num_hidden_layers - 1)
    module, row = f"model.layers.{layer}.attnres", i - max(1, 2 * layer)
    query, gate = weights[f"{module}.query"][row], 1.0
    if config.attnres_init is not None:
        gate = weights[f"{module}.gate"][row]
    rows = []
    for t in range(len(stream)):
        tokens = [source[t] for source in sources]
        scores = [query @ rms_norm(each, torch.ones_like(each), config.rms_norm_eps) for each in tokens]
        whole = sum(torch.exp(score) for score in scores)
        mean = sum(torch.exp(score) / whole * each for score, each in zip(scores, tokens, strict=True))
        rows.append((1 - gate) * stream[t] + gate * mean)
    return torch.stack(rows)


def depth_gate(config: ResFormerConfig, weights: Weights, n: int, head: int) -> torch.Tensor:
    """g of a layer and a key/value head; 0 where nothing is mixed."""
    layers = config.value_residual_layers or list(range(1, config.num_hidden_layers))
    if n not in layers:
        return torch.zeros((), dtype=torch.float64)
    return weights[f"model.layers.{n}.value_residual.gate"][head]


def over_depth(
    query: torch.Tensor,
    keys: Mapping[int, torch.Tensor],
    values: Mapping[int, torch.Tensor],
    gate: torch.Tensor,
    stride: int,
) -> torch.Tensor:
    """V'_n of one head: each token attends to itself in layers 0, stride, 2 stride, ... below n, and in n."""
    n = max(values)
    layers = [*range(0, n, stride), n]
    rows = []
    for t in range(len(query)):
        exponentials = {m: torch.exp(keys[m][t] @ query[t] / math.sqrt(query.shape[-1])) for m in layers}
        whole = sum(exponentials.values())
        over = sum(exponentials[m] / whole * values[m][t] for m in layers)
        rows.append(values[n][t] + gate * (over - values[n][t]))
    return torch.stack(rows)


def linear(states: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    output = states @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return output if bias is None else output + bias


def heads(states: torch.Tensor, number: int) -> list[torch.Tensor]:
    return list(states.chunk(number, dim=-1))


def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return weight * states / (states.pow(2).mean(dim=-1, keepdim=True) + epsilon).sqrt()


def rotate(states: torch.Tensor, theta: float) -> torch.Tensor:
    """Turns channel pairs (i, i + d/2) of the token at position p by the angle p theta^(-2i/d)."""
    half = states.shape[-1] // 2
    rows = []
    for position, row in enumerate(states):
        angles = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=torch.float64)
        first, second = row[:half], row[half:]
        rows.append(
            torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
        )
    return torch.stack(rows)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One head: each token sees itself and what came before it."""
    rows = []
    for t in range(len(query)):
        scores = key[: t + 1] @ query[t] / math.sqrt(query.shape[-1])
        exponentials = torch.exp(scores - scores.max())
        rows.append(exponentials / exponentials.sum() @ value[: t + 1])
    return torch.stack(rows)
