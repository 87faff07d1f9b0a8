"""A small ledger: accounts, transfers, balances in cents."""


class Ledger:
    def __init__(self) -> None:
        self.balances: dict[str, int] = {}
        self.history: list[tuple[str, str, int]] = []

    def deposit(self, account: str, cents: int) -> None:
        self.balances[account] = self.balances.get(account, 0) + cents

    def transfer(self, source: str, target: str, cents: int) -> None:
        self.balances[source] = self.balances.get(source, 0) - cents
        self.balances[target] = self.balances.get(target, 0) + cents
        self.history.append((source, target, cents))

    def split(self, total: int, ways: int) -> list[int]:
        """Shares of *total* that differ by at most one cent and add up to it."""
        return [total // ways] * ways
