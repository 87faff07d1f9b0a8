//! Processes of the sandbox: started, watched, written to and ended through `process.Process`.

mod broadcast;
mod ending;
mod input;
mod registry;
mod running;
pub(crate) mod service;
mod start;
mod stream;

pub(crate) use registry::Registry;
