#![no_main]

#[allow(dead_code, reason = "one of them for each target")]
#[path = "../../crates/layers/tests/cases/mod.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::index(bytes));
