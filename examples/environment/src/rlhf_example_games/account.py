"""`account`: an environment whose public methods are tools, with nothing to import from the framework."""


class Account:
    """Do with an account what the prompt says; rewarded where its balance is the prompt's answer in the end."""

    def reset(self, answer=None):
        """Empty the account. Parameters are given what the prompt's line has under their names."""
        self.answer = answer
        self.balance = 0

    def deposit(self, amount: int) -> str:
        """Put money into the account.

        Args:
            amount: How much.
        """
        self.balance += amount
        return f"balance: {self.balance}"

    def withdraw(self, amount: int) -> str:
        """Take money out of the account.

        Args:
            amount: How much; at most what is there.
        """
        if amount > self.balance:
            return f"refused: the balance is {self.balance}"
        self.balance -= amount
        return f"balance: {self.balance}"

    def get_reward(self) -> float:
        """Asked when the policy calls no more tools."""
        return float(str(self.balance) == str(self.answer))
