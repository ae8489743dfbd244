"""Pure: the refusal of a message that no correct member sends."""


class Violation(Exception):
    """A message that no correct member sends; it has no effect. The shell ends its link.

    Attributes:
        rule: Short fixed name of the rule.
        detail: The value that breaks the rule.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail
