//! What the guest daemon says and understands, as pure functions of bytes.
//!
//! Framing and errors follow the Connect protocol, messages the JSON mapping of
//! proto3. Nothing here does I/O, so every rule is tested without a socket.

mod error;
pub mod filesystem;
pub mod frame;
pub mod init;
pub mod json;
pub mod multipart;
pub mod path;
pub mod process;
pub mod query;
pub mod range;
pub mod secret;
pub mod signature;
pub mod time;

pub use error::{Code, RpcError};
