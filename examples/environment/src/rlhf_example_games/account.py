"""`account`: an environment whose public methods are tools, without imports from the framework."""


class Account:
    """Manage an account as the prompt requests. The reward is 1 if its final balance is the prompt's answer."""

    def reset(self, answer=None):
        """Empty the account. Parameters receive the values of these keys of the prompt's record."""
        self.answer = answer
        self.balance = 0

    def deposit(self, amount: int) -> str:
        """Put money into the account.

        Args:
            amount: The amount.
        """
        self.balance += amount
        return f"balance: {self.balance}"

    def withdraw(self, amount: int) -> str:
        """Take money out of the account.

        Args:
            amount: The amount, at most the balance.
        """
        if amount > self.balance:
            return f"refused: the balance is {self.balance}"
        self.balance -= amount
        return f"balance: {self.balance}"

    def get_reward(self) -> float:
        """Called when a turn of the policy does not call a tool."""
        return float(str(self.balance) == str(self.answer))
