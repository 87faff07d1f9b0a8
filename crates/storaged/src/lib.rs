//! The storage daemon: immutable layers, thin uppers above them, and the images that guests see.
//!
//! Front ends (`fuse`, `ublk`) serve a [`device::Device`] and know nothing of layers; what
//! is served knows nothing of how. The daemon outlives the control plane, and whatever it
//! has acknowledged outlives the daemon.

pub mod device;
pub mod directory;
pub mod error;
pub mod fuse;
pub mod keeper;
pub mod protocol;
