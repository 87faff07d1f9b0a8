//! One at a time, for each key.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Condvar, Mutex, PoisonError};

pub struct Keyed<K> {
    taken: Mutex<HashSet<K>>,
    freed: Condvar,
}

impl<K> Default for Keyed<K> {
    fn default() -> Self {
        Self { taken: Mutex::default(), freed: Condvar::new() }
    }
}

impl<K: Eq + Hash + Clone> Keyed<K> {
    /// Waits until nobody has *key*, and has it for as long as the answer lives.
    pub fn lock(&self, key: &K) -> Turn<'_, K> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while taken.contains(key) {
            taken = self.freed.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        taken.insert(key.clone());
        Turn { key: key.clone(), of: self }
    }
}

pub struct Turn<'a, K: Eq + Hash + Clone> {
    key: K,
    of: &'a Keyed<K>,
}

impl<K: Eq + Hash + Clone> Drop for Turn<'_, K> {
    fn drop(&mut self) {
        self.of.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        self.of.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_has_a_key_at_a_time_and_another_key_is_free() {
        let keyed = Keyed::default();
        let inside = AtomicUsize::new(0);
        let _other = keyed.lock(&"other");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _turn = keyed.lock(&"same");
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
