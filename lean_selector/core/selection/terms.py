"""The terms of one decision, from what the router and the request were told."""

from lean_selector.core.selection.settings import RouterOverride, RouterSettings, Terms


def terms(settings: RouterSettings) -> Terms:
    return Terms(
        settings.overlap_score_credit,
        settings.overlap_score_credit_decay,
        settings.prefill_load_scale,
        settings.temperature,
        settings.track_prefill_tokens,
        settings.host_weight,
        settings.disk_weight,
        settings.active_request_weight,
        settings.dialect.credits_untracked,
    )


def overridden(base: Terms, override: RouterOverride) -> Terms:
    """`base` with what `override` names put in its place."""
    credit = override.overlap_score_credit
    scale = override.prefill_load_scale
    if override.overlap_score_weight is not None:
        scale = override.overlap_score_weight
        if scale == 0.0:
            credit = 0.0
    temperature, track = override.router_temperature, override.track_prefill_tokens
    return Terms(
        base.credit if credit is None else credit,
        base.decay,
        base.scale if scale is None else scale,
        base.temperature if temperature is None else temperature,
        base.track_prefill if track is None else track,
        base.host_weight,
        base.disk_weight,
        base.request_weight,
        base.credits_untracked,
    )
