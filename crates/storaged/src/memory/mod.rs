//! Guest memory as a VMM process has it: found, captured, and frozen for a capture at leisure.
//!
//! Nothing here changes what a guest or a VMM can see. What fails leaves the process as it
//! was, so every error says *rolled back*.

pub mod capture;
mod failure;
#[cfg(target_arch = "x86_64")]
pub mod freeze;
pub mod layer;
pub mod maps;
pub mod process;
pub mod scan;
#[cfg(target_arch = "x86_64")]
pub mod source;

/// The unit in which memory is changed, captured and shared.
pub const PAGE_BYTES: u64 = 4096;
