//! Processes of the sandbox: started, watched, written to and ended through `process.Process`.

mod broadcast;
mod ending;
mod input;
mod registry;
mod running;
pub(crate) mod service;
mod start;
mod stream;

use std::future::poll_fn;
use std::rc::Rc;

use wire::RpcError;
use wire::process::{ProcessConfig, StartRequest};

use crate::app::App;

pub(crate) use registry::Registry;

/// Runs a program of the image as root, like a process of a user's, to its end, however that is.
///
/// # Errors
/// When it cannot be started.
pub(crate) async fn run_to_end(app: &Rc<App>, command: &[String]) -> Result<(), RpcError> {
    let (program, arguments) = command.split_first().ok_or_else(|| RpcError::invalid("no program"))?;
    let process = ProcessConfig { cmd: program.clone(), args: arguments.to_vec(), ..ProcessConfig::default() };
    let request = StartRequest { process, stdin: Some(false), ..StartRequest::default() };
    let (_, mut output) = start::start(app.clone(), app.user(Some("root"))?, request, None).await?;
    while let broadcast::Item::Frame(_) = poll_fn(|cx| output.poll_next(cx)).await {}
    Ok(())
}
