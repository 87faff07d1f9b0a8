//! What was fetched, found and failed, since the daemon started.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use super::failure::Failure;

#[derive(Default)]
pub struct Count(AtomicU64);

impl Count {
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$about:meta])* $name:ident),* $(,)?) => {
        #[derive(Default)]
        pub struct Counters {
            $($(#[$about])* pub $name: Count,)*
        }

        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        pub struct Counted {
            $($(#[$about])* pub $name: u64,)*
        }

        impl Counters {
            pub fn read(&self) -> Counted {
                Counted { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Reads, or parts of them, that found their block here.
    hits,
    /// Blocks that were not here when they were needed, or were fetched ahead of need.
    missed,
    /// Reads that waited for a block that was on its way already.
    joined,
    /// Blocks that were fetched since reads came in order.
    guessed,
    requests,
    fetched_bytes,
    /// Blocks that were not kept since the disk was slower than the network.
    behind,
    /// Times that bytes turned out to be wrong when they were used.
    distrusted,
    /// Attempts that failed, by how.
    absent,
    denied,
    unreachable,
    corrupt,
}

impl Counters {
    pub fn failed(&self, failure: &Failure) {
        let counter = match failure {
            Failure::Absent(_) => &self.absent,
            Failure::Denied(_) => &self.denied,
            Failure::Unreachable(_) => &self.unreachable,
            Failure::Corrupt(_) => &self.corrupt,
        };
        counter.add(1);
    }
}
