//! Every parser over known files and thousands of changes of them: an answer or an error, in
//! bounded memory, and never a panic. The same as `fuzz/`, without a fuzzer and with an end.

mod cases;

use std::fs;
use std::path::PathBuf;

/// Changed files for each parser and known file.
const ROUNDS: u64 = 300;

/// What formats have trouble with.
const WORDS: [u64; 12] =
    [0, 1, 0xff, 512, 4096, 1 << 31, u32::MAX as u64, (1 << 50) - 1, 1 << 50, 1 << 55, i64::MAX as u64, u64::MAX];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() >> 1).unwrap_or_default() % end.max(1)
    }

    /// Where formats keep what matters: at either end, or anywhere.
    fn place(&mut self, length: usize) -> usize {
        match self.below(4) {
            0 => self.below(length.min(140)),
            1 => length.saturating_sub(4096) + self.below(length.min(140)),
            2 => length.saturating_sub(1 + self.below(length.min(6000))),
            _ => self.below(length),
        }
        .min(length.saturating_sub(1))
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let at = self.place(bytes.len());
        match self.below(7) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => {
                let word = WORDS[self.below(WORDS.len())].to_le_bytes();
                let length = word.len().min(bytes.len() - at);
                bytes[at..at + length].copy_from_slice(&word[..length]);
            }
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..bytes.len().min(at + 1 + self.below(4096)))),
            4 => {
                let again = bytes[at..bytes.len().min(at + 1 + self.below(600))].to_vec();
                let place = self.place(bytes.len());
                bytes.splice(place..place, again);
            }
            5 => {
                let end = bytes.len().min(at + 1 + self.below(64));
                bytes[at..end].fill(if self.below(2) == 0 { 0 } else { 0xff });
            }
            _ => {
                let end = bytes.len().min(at + 1 + self.below(32));
                for byte in &mut bytes[at..end] {
                    *byte = self.0.to_le_bytes()[1];
                    self.next();
                }
            }
        }
    }
}

/// The files of `spec/layers` that a parser may meet, and some that are hardly files.
fn known() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../spec/layers");
    let mut known: Vec<_> = fs::read_dir(folder)
        .expect("spec/layers is there")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|kind| kind != "json" && kind != "md"))
        .map(|path| (path.display().to_string(), fs::read(path).expect("a file")))
        .collect();
    known.sort();
    assert!(known.len() >= 12, "all of them are there");
    known.extend([0, 1, 511, 512, 1024, 4096, 8192].map(|length| (format!("{length} zeros"), vec![0; length])));
    known
}

/// Only what is worth it: the parts of a big file that its parser looks at.
fn entries_of(bytes: &[u8]) -> Vec<u8> {
    bytes[bytes.len().saturating_sub(8192)..bytes.len().saturating_sub(4096)].to_vec()
}

/// The most memory this process ever had, in bytes.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the peak is there");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

// One test, since the memory that it looks at is that of the process.
#[test]
fn no_bytes_make_a_parser_panic_or_take_memory_they_do_not_have() {
    let known = known();
    let before = peak_memory();
    let mut random = Random(0x6c61_7965_7273);
    for (name, good) in &known {
        for round in 0..ROUNDS {
            let mut bytes = good.clone();
            if round > 0 {
                (0..=random.below(4)).for_each(|_| random.change(&mut bytes));
            }
            let told = bytes.len();
            let case = std::panic::catch_unwind(|| {
                cases::header(&bytes);
                cases::layer(&bytes);
                cases::zfile(&bytes);
                cases::log(&bytes);
            });
            assert!(case.is_ok(), "round {round} of {name}, {told} bytes");

            let mut entries = entries_of(good);
            (0..=random.below(3)).for_each(|_| random.change(&mut entries));
            let case = std::panic::catch_unwind(|| {
                cases::index(&entries);
                cases::log(&entries);
            });
            assert!(case.is_ok(), "entries of round {round} of {name}");
        }
    }
    let grown = peak_memory() - before;
    assert!(grown < 48 << 20, "{grown} bytes more at the peak");
}
