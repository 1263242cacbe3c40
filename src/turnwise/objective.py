"""Says in formulas what a run optimises, with its numbers."""

from __future__ import annotations

from turnwise.config import LOSS_AGGREGATION, CreditConfig, LossConfig

_UNITS = {
    "token": "1/N_tokens Σ_tokens",
    "turn": "1/N_turns Σ_turns",
    "episode": "1/N_episodes Σ_episodes",
}
_INNER = {"mean": "1/|y| Σ_t", "sum": "Σ_t", "constant": "1/max_new_tokens Σ_t"}


def describe_objective(loss: LossConfig, credit: CreditConfig) -> str:
    """The effective objective, one term per line; every number in force appears."""
    lines = [
        f"L = {_mean(loss)} [ {' '.join(_terms(loss))} ]",
        f"  {_ratio(loss)}",
        f"  A = {_advantage(credit)}",
    ]
    if loss.value_coefficient:
        lines.insert(1, f"    + {loss.value_coefficient:g} · 1/N_turns Σ_turns (V - G)²")
    if loss.kl_coefficient and loss.kl_place == "reward":
        lines.append(f"  A_t ← A_t - {loss.kl_coefficient:g} {_divergence(loss)}")
    if loss.kl_coefficient:
        lines.append(f"  π_ref = {_reference(loss)}")
    if loss.kl_target is not None:
        lines.append(
            f"  β starts at {loss.kl_coefficient:g} and follows KL ≈ {loss.kl_target:g}: "
            f"β ← β (1 + 0.1 clip(KL/{loss.kl_target:g} - 1, -1, 1))"
        )
    lines.append("  over action tokens; log-probs under the temperature and kept sets they were sampled with")
    return "\n".join(line for line in lines if line.strip())


def _mean(loss: LossConfig) -> str:
    unit, inner = LOSS_AGGREGATION[loss.name]
    unit = loss.aggregate or unit
    return _UNITS[unit] if unit == "token" else f"{_UNITS[unit]} {_INNER[inner]}"


def _terms(loss: LossConfig) -> list[str]:
    weight = "w · " if loss.importance_cap is not None else ""
    if loss.name == "reinforce":
        term = f"-{weight}A log π(y_t)"
    elif loss.name == "cispo":
        term = f"-{weight}sg(min(r, {loss.clip_high:g})) A log π(y_t)"
    else:
        low, high = 1 - (loss.clip_low or 0), 1 + (loss.clip_high or 0)
        term = f"{weight}max(-A r, -A clip(r, {low:g}, {high:g}))"
        if loss.dual_clip is not None:
            term = f"{weight}min(max(-A r, -A clip(r, {low:g}, {high:g})), -{loss.dual_clip:g} A if A < 0)"
    terms = [term]
    if loss.entropy_coefficient:
        terms.append(f"- {loss.entropy_coefficient:g} H(π)")
    if loss.kl_coefficient and loss.kl_place == "loss":
        terms.append(f"+ {loss.kl_coefficient:g} {_divergence(loss)}")
    return terms


def _ratio(loss: LossConfig) -> str:
    old = "π_before" if loss.importance_cap is not None else "π_sampled"
    parts = []
    if loss.name == "gspo":
        parts.append(f"r = exp(mean over the turn of log π(y_t) - log {old}(y_t))")
    elif loss.name != "reinforce":
        parts.append(f"r = π(y_t) / {old}(y_t)")
    if loss.importance_cap is not None:
        parts.append(f"w = min(π_before(y_t) / π_sampled(y_t), {loss.importance_cap:g})")
    return ", ".join(parts)


def _divergence(loss: LossConfig) -> str:
    return {
        "k1": "(log π - log π_ref)",
        "k2": "(log π - log π_ref)²/2",
        "k3": "(π_ref/π - log(π_ref/π) - 1)",
    }[loss.kl_kind or "k3"]


def _reference(loss: LossConfig) -> str:
    if loss.reference == "ema":
        return f"moving average: ref ← {loss.ema_decay:g} ref + {1 - (loss.ema_decay or 0):g} π every {loss.ema_every} updates"
    return {
        "frozen": "the weights at the start",
        "adapter_off": "the model without its adapter",
    }.get(
        loss.reference or "", "the model without its adapter, or the weights at the start when there is none"
    )


def _advantage(credit: CreditConfig) -> str:
    shaped = ""
    if credit.invalid_action_penalty:
        shaped = f"; an invalid action costs {credit.invalid_action_penalty:g}"
    if credit.estimator == "rloo":
        text = "R - mean of the other episodes of the group" + (
            ", divided by the batch's std" if credit.normalize else ""
        )
    elif credit.estimator == "grpo":
        divided = {"group": " / std of the group", "batch": " / std of the batch", "none": ""}[
            credit.scale or "group"
        ]
        text = f"(R - mean of the group){divided}"
    elif credit.estimator == "gigpo":
        text = _gigpo(credit)
    elif credit.estimator == "gae":
        text = (
            f"Σ_l ({credit.gamma:g} · {credit.lam:g})^l δ_(k+l), δ_k = r_k + {credit.gamma:g} V_(k+1) - V_k"
        )
    else:
        text = f"(G_k - mean of the batch) / std of the batch, G_k = Σ_j {credit.gamma:g}^(j-k) r_j"
    return f"{text}   [{credit.estimator}]{shaped}"


def _gigpo(credit: CreditConfig) -> str:
    omega = credit.omega or 0.0
    if credit.combine == "convex":
        text = f"{omega:g} A_E + {1 - omega:g} A_S"
    else:
        text = f"A_E + {omega:g} A_S"
    norm = "/ std" if credit.step_norm == "mean_std" else "(mean only)"
    return (
        f"{text}, A_E = R against the group's {credit.episode_stats} {norm}, "
        f"A_S = G_k against equal states {norm}, G_k = Σ_j {credit.gamma:g}^(j-k) r_j"
    )
