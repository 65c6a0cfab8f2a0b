"""Kimi-Linear and Kimi-K3 in float64 numpy, one token at a time, from published tensors.

Written from the formulas alone and sharing nothing with the package: no chunks, no absorbed
products, no batches. Tensors are those of a checkpoint, by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def unpack_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Value by value: sign, two exponent bits, one mantissa bit; a scale for every 32 inputs."""
    out = np.zeros((packed.shape[0], 2 * packed.shape[1]))
    for (row, column), _ in np.ndenumerate(out):
        byte = int(packed[row, column // 2])
        code = byte >> 4 if column % 2 else byte & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        sign = -1 if code & 8 else 1
        out[row, column] = sign * size * 2.0 ** (int(scale[row, column // 32]) - 127)
    return out


class Oracle:
    """One sequence. `step` takes a token and gives the logits after it."""

    def __init__(self, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        self.c = config.get("text_config", config)
        self.linear = self.c["linear_attn_config"]
        self.k3 = "attn_res_block_size" in self.c
        self.prefix = "language_model." if self.k3 else ""
        self.w: dict[str, np.ndarray] = {}
        for name, x in tensors.items():
            base = name.removeprefix(self.prefix)
            if base.endswith("weight_packed"):
                scale = tensors[name.replace("weight_packed", "weight_scale")]
                self.w[base.replace("weight_packed", "weight")] = unpack_mxfp4(x, scale)
            elif not base.endswith("weight_scale"):
                self.w[base] = x.astype(np.float64)
        self.states: dict[int, dict[str, Any]] = {}
        self.gap = np.inf  # the closest that any choice of experts came to another

    def get(self, layer: int, name: str) -> np.ndarray:
        return self.w[f"model.layers.{layer}.{name}"]

    def run(self, token_ids: np.ndarray) -> np.ndarray:
        return np.stack([self.step(int(token)) for token in token_ids])

    def step(self, token: int) -> np.ndarray:
        stream = self.w["model.embed_tokens.weight"][token]
        forward = self.mixed if self.k3 else self.plain
        hidden = rms_norm(forward(stream), self.w["model.norm.weight"], self.c["rms_norm_eps"])
        return self.w["lm_head.weight"] @ hidden

    def plain(self, x: np.ndarray) -> np.ndarray:
        for i in range(self.c["num_hidden_layers"]):
            x = x + self.attention(i, x)
            x = x + self.feed_forward(i, x)
        return x

    def mixed(self, x: np.ndarray) -> np.ndarray:
        """Attention residuals: what a layer reads is a mixture of stored streams and this one."""
        stored: list[np.ndarray] = []
        for i in range(self.c["num_hidden_layers"]):
            name = f"model.layers.{i}.self_attention_res"
            u = self.mix([*stored, x], name) if stored else x
            if i % self.c["attn_res_block_size"] == 0:
                stored.append(x)
                x = np.zeros_like(x)
            x = x + self.attention(i, u)
            m = self.mix([*stored, x], f"model.layers.{i}.mlp_res")
            x = x + self.feed_forward(i, m)
        return self.mix([*stored, x], "model.output_attn_res")

    def mix(self, streams: list[np.ndarray], name: str) -> np.ndarray:
        norm, proj = self.w[name + "_norm.weight"], self.w[name + "_proj.weight"][0]
        scores = [(rms_norm(v, norm, self.c["rms_norm_eps"]) * proj).sum() for v in streams]
        return softmax(np.array(scores)) @ np.stack(streams)

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        h = rms_norm(x, self.get(i, "input_layernorm.weight"), self.c["rms_norm_eps"])
        full = i + 1 in self.linear["full_attn_layers"]
        return self.latent(i, h) if full else self.delta(i, h)

    def delta(self, i: int, h: np.ndarray) -> np.ndarray:
        def p(name: str) -> np.ndarray:
            return self.get(i, f"self_attn.{name}")

        heads, dim = self.linear["num_heads"], self.linear["head_dim"]
        taps = self.linear["short_conv_kernel_size"]
        state = self.states.setdefault(
            i, {"S": np.zeros((heads, dim, dim)), "q": [], "k": [], "v": []}
        )
        convolved = {}
        for name in "qkv":
            window = state[name]
            window.append(p(f"{name}_proj.weight") @ h)
            y = np.zeros(heads * dim)
            for back, past in enumerate(reversed(window[-taps:])):
                y += p(f"{name}_conv1d.weight")[:, 0, taps - 1 - back] * past
            convolved[name] = (y * sigmoid(y)).reshape(heads, dim)
        q, k, v = unit(convolved["q"]) * dim**-0.5, unit(convolved["k"]), convolved["v"]
        z = p("f_b_proj.weight") @ (p("f_a_proj.weight") @ h) + p("dt_bias")
        z, rate = z.reshape(heads, dim), np.exp(p("A_log").reshape(-1)[:heads])
        beta = sigmoid(p("b_proj.weight") @ h)
        if self.k3:
            gate = p("g_proj.weight") @ h
        else:
            gate = p("g_b_proj.weight") @ (p("g_a_proj.weight") @ h)
        out = np.zeros((heads, dim))
        for n in range(heads):
            if self.k3:
                g = self.linear["gate_lower_bound"] * sigmoid(rate[n] * z[n])
            else:
                g = -rate[n] * np.log1p(np.exp(z[n]))
            s = state["S"][n]
            s *= np.exp(g)[:, None]
            s += np.outer(k[n], beta[n] * (v[n] - s.T @ k[n]))
            out[n] = rms_norm(s.T @ q[n], p("o_norm.weight"), self.c["rms_norm_eps"])
        return p("o_proj.weight") @ (out.reshape(-1) * sigmoid(gate))

    def latent(self, i: int, h: np.ndarray) -> np.ndarray:
        def p(name: str) -> np.ndarray:
            return self.get(i, f"self_attn.{name}")

        c = self.c
        heads, own, shared = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        width, rank = c["v_head_dim"], c["kv_lora_rank"]
        if c["q_lora_rank"]:
            inner = rms_norm(p("q_a_proj.weight") @ h, p("q_a_layernorm.weight"), 1e-6)
            q = p("q_b_proj.weight") @ inner
        else:
            q = p("q_proj.weight") @ h
        q = q.reshape(heads, own + shared)
        row = p("kv_a_proj_with_mqa.weight") @ h
        latent = rms_norm(row[:rank], p("kv_a_layernorm.weight"), 1e-6)
        kv = (p("kv_b_proj.weight") @ latent).reshape(heads, own + width)
        past = self.states.setdefault(i, {"k": [], "v": []})
        past["k"].append([np.concatenate([kv[n, :own], row[rank:]]) for n in range(heads)])
        past["v"].append(kv[:, own:])
        out = np.zeros((heads, width))
        for n in range(heads):
            scores = np.array([k[n] @ q[n] for k in past["k"]]) * (own + shared) ** -0.5
            out[n] = softmax(scores) @ np.stack([v[n] for v in past["v"]])
        flat = out.reshape(-1)
        if c.get("mla_use_output_gate"):
            flat = flat * sigmoid(p("g_proj.weight") @ h)
        return p("o_proj.weight") @ flat

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        h = rms_norm(x, self.get(i, "post_attention_layernorm.weight"), self.c["rms_norm_eps"])
        if i < self.c["first_k_dense_replace"]:
            name = "mlp" if self.k3 else "block_sparse_moe"  # as save_pretrained writes it
            return self.block(i, name, h, ("gate_proj", "up_proj", "down_proj"))
        return self.experts(i, h)

    def block(self, i: int, name: str, h: np.ndarray, parts: tuple[str, ...]) -> np.ndarray:
        gate, up, down = (self.get(i, f"{name}.{part}.weight") for part in parts)
        a, b = gate @ h, up @ h
        if self.c.get("hidden_act", "silu") == "situ":
            return down @ (4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25))
        return down @ (a * sigmoid(a) * b)

    def experts(self, i: int, h: np.ndarray) -> np.ndarray:
        c, name = self.c, "block_sparse_moe"
        top = c["num_experts_per_token"]
        scores = sigmoid(self.get(i, f"{name}.gate.weight") @ h)
        biased = scores + self.get(i, f"{name}.gate.e_score_correction_bias")
        order = np.argsort(-biased)
        self.gap = min(self.gap, biased[order[top - 1]] - biased[order[top]])
        chosen = order[:top]
        weights = scores[chosen] / (scores[chosen].sum() + 1e-20) * c["routed_scaling_factor"]
        x = self.get(i, f"{name}.routed_expert_down_proj.weight") @ h if self.k3 else h
        routed = sum(
            w * self.block(i, f"{name}.experts.{e}", x, ("w1", "w3", "w2"))
            for w, e in zip(weights, chosen, strict=True)
        )
        if self.k3:
            norm = self.get(i, f"{name}.routed_expert_norm.weight")
            routed = rms_norm(np.asarray(routed), norm, c["rms_norm_eps"])
            routed = self.get(i, f"{name}.routed_expert_up_proj.weight") @ routed
        shared = self.block(i, f"{name}.shared_experts", h, ("gate_proj", "up_proj", "down_proj"))
        return routed + shared
