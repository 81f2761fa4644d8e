"""Texts on how tokens of a run choose experts, where a user should know of it."""

from megalite.config.schema import Config

IN_TURN, UNTAUGHT = "experts_in_turn", "routers_untaught"  # events of a run


def routing_notes(config: Config) -> dict[str, str]:
    """Texts on choices that routers do not make or do not learn, by the event that tells them in a run; often none."""
    experts = config.model.experts
    if experts is None:
        return {}
    if experts.force_balance:
        text = "model.experts.force_balance: tokens take experts in turn, whatever routers say."
        return {IN_TURN: f"{text} Times are those of balanced routing, and the model is of no other use."}
    if experts.active > 1 or not experts.normalize or config.adapter is not None:
        return {}
    losses = " and ".join(name for name in ("balance_loss", "z_loss") if getattr(experts, name))
    taught = f"{losses} alone trains routers" if losses else "nothing trains routers"
    text = "model.experts.normalize with active = 1: the score of a token's only expert is 1 whatever its router says"
    return {UNTAUGHT: f"{text}, so {taught}; normalize=false gives them a gradient."}
