//! The system calls that need `unsafe`, behind functions that do not.
//!
//! This is the only crate that may say `unsafe`. It decides nothing: each function is
//! one thing the kernel does, and every block says why it is sound.

pub mod buffer;
#[cfg(target_arch = "x86_64")]
pub mod copy_code;
pub mod credentials;
pub mod early;
pub mod fuse;
pub mod inherit;
pub mod interrupt;
pub mod link;
pub mod memory;
pub mod namespace;
pub mod pagemap;
pub mod random;
pub mod ready;
pub mod remote;
pub mod signals;
pub mod spawn;
#[cfg(target_arch = "x86_64")]
pub mod trace;
pub mod ublk;
