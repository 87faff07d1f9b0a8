//! Which order to freeze or to thaw is the latest: one that arrives after a later one is void.
//!
//! The node gives up on an answer and goes on, and what it asked may still be on its way. A
//! freeze that took effect after the thaw that followed it would leave the workload still for ever.

use std::cell::Cell;

use tokio::sync::Notify;

/// The number of the latest order. The node's numbers grow; one may come twice, when an answer was lost.
#[derive(Default)]
pub(crate) struct Turns {
    latest: Cell<u64>,
    changed: Notify,
}

/// A later order was there first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Late;

impl Turns {
    /// Makes *turn* the latest and returns it; without a number it is later than all before.
    ///
    /// # Errors
    /// When a later one has been taken.
    pub(crate) fn take(&self, turn: Option<u64>) -> Result<u64, Late> {
        let latest = self.latest.get();
        let turn = turn.unwrap_or(latest.saturating_add(1));
        if turn < latest {
            return Err(Late);
        }
        self.set(turn);
        Ok(turn)
    }

    /// Takes any number from here on: the orders are those of another generation.
    pub(crate) fn start_anew(&self) {
        self.set(0);
    }

    pub(crate) fn is_latest(&self, turn: u64) -> bool {
        self.latest.get() == turn
    }

    /// Returns once *turn* is not the latest any more.
    pub(crate) async fn wait_passed(&self, turn: u64) {
        while self.is_latest(turn) {
            self.changed.notified().await;
        }
    }

    fn set(&self, turn: u64) {
        self.latest.set(turn);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_order_is_void_and_a_repeated_one_is_not() {
        let turns = Turns::default();
        assert_eq!(turns.take(Some(5)), Ok(5));
        assert_eq!(turns.take(Some(6)), Ok(6));
        assert_eq!(turns.take(Some(5)), Err(Late));
        assert_eq!(turns.take(Some(6)), Ok(6));
        assert!(turns.is_latest(6));
    }

    #[test]
    fn an_order_without_a_number_is_the_latest() {
        let turns = Turns::default();
        assert_eq!(turns.take(Some(5)), Ok(5));
        assert_eq!(turns.take(None), Ok(6));
        assert_eq!(turns.take(Some(5)), Err(Late));
        assert_eq!(turns.take(Some(u64::MAX)), Ok(u64::MAX));
        assert_eq!(turns.take(None), Ok(u64::MAX));
    }

    #[test]
    fn another_generation_counts_from_the_start() {
        let turns = Turns::default();
        assert_eq!(turns.take(Some(1000)), Ok(1000));
        turns.start_anew();
        assert_eq!(turns.take(Some(1)), Ok(1));
    }

    #[tokio::test]
    async fn who_carries_out_an_order_learns_of_a_later_one() {
        let turns = Turns::default();
        let turn = turns.take(Some(1)).unwrap();
        let later = async { turns.take(Some(2)) };
        let ((), taken) = tokio::join!(turns.wait_passed(turn), later);
        assert_eq!(taken, Ok(2));
    }
}
