import unittest

from ledger import Ledger


class LedgerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.ledger = Ledger()
        self.ledger.deposit("ada", 1000)

    def test_transfer_moves_money(self) -> None:
        self.ledger.transfer("ada", "bob", 300)
        self.assertEqual(self.ledger.balances, {"ada": 700, "bob": 300})

    def test_transfer_keeps_the_total(self) -> None:
        self.ledger.transfer("ada", "ada", 100)
        self.assertEqual(sum(self.ledger.balances.values()), 1000)

    def test_overdraft_is_refused_and_changes_nothing(self) -> None:
        with self.assertRaises(ValueError):
            self.ledger.transfer("ada", "bob", 5000)
        self.assertEqual(self.ledger.balances, {"ada": 1000})
        self.assertEqual(self.ledger.history, [])

    def test_split_loses_no_cent(self) -> None:
        shares = self.ledger.split(1000, 3)
        self.assertEqual(sum(shares), 1000)
        self.assertLessEqual(max(shares) - min(shares), 1)


if __name__ == "__main__":
    unittest.main()
