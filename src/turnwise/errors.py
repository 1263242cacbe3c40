"""The exceptions that turnwise raises on purpose; each also is the built-in kind a caller would expect."""


class TurnwiseError(Exception):
    """Something the user can mend: the message says what was wrong, with the value, and what to do."""


class ConfigError(TurnwiseError, ValueError):
    """A config file, an override or a combination of settings cannot be right."""


class TemplateError(TurnwiseError, ValueError):
    """A chat template is missing, raised, or rewrote history where that was forbidden."""


class ModelError(TurnwiseError, ValueError):
    """A model folder is incomplete, or its parts do not belong together."""


class PolicyError(TurnwiseError, RuntimeError):
    """A policy could not produce a completion."""


class ContextOverflowError(PolicyError):
    """A prompt and its completion do not fit into the model's context."""


class EnvironmentFailure(TurnwiseError, RuntimeError):
    """An environment raised, hung or returned something that is not an observation."""


class RewardError(TurnwiseError, ValueError):
    """A reward function is malformed, or what it returned cannot be used."""


class SandboxError(TurnwiseError, RuntimeError):
    """Reward code could not be run safely."""


class CreditError(TurnwiseError, ValueError):
    """Advantages cannot be computed from these columns."""


class SampleError(TurnwiseError, ValueError):
    """An episode cannot be trained on."""


class TrainingError(TurnwiseError, RuntimeError):
    """An update was aborted before it changed anything."""


class StoreError(TurnwiseError, RuntimeError):
    """A run folder is damaged, missing or in use."""


class SceneError(TurnwiseError, ValueError):
    """A 3-D scene or its annotation cannot be read."""
