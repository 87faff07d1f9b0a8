//! The storage daemon: immutable layers, thin uppers above them, and the images that guests see.
//!
//! Front ends (`fuse`, `ublk`) serve a [`device::Device`] and know nothing of layers; what
//! is served knows nothing of how. The daemon outlives the control plane, and whatever it
//! has acknowledged outlives the daemon.

pub mod content;
mod counter;
pub mod device;
pub mod directory;
pub mod error;
pub mod files;
pub mod fuse;
pub mod image;
pub mod keeper;
pub mod keyed;
pub mod layer;
pub mod library;
pub mod memory;
pub mod merged;
pub mod merger;
pub mod names;
pub mod node;
pub mod protocol;
pub mod reading;
pub mod remote;
pub mod root;
pub mod server;
pub mod stack;
pub mod transfer;
pub mod ublk;
pub mod upper;
pub mod working_set;
