//! The eight methods of `process.Process`.

use std::rc::Rc;

use hyper::Request;
use hyper::body::Incoming;
use wire::process::{
    ListResponse, ProcessInfo, SelectRequest, SendInputRequest, SendSignalRequest, StartRequest, StreamInput,
    StreamInputFields, UpdateRequest,
};
use wire::{Code, RpcError, json};

use super::running::Process;
use super::start::start;
use super::stream::EventStream;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::http::rpc::{self, MessageReader};

/// Answers a call of this service.
pub(crate) async fn call(app: Rc<App>, method: &str, request: Request<Incoming>) -> Answer {
    match method {
        "Start" => rpc::streaming(request, async |request| start_process(&app, request).await).await,
        "Connect" => rpc::streaming(request, async |request| connect(&app, request).await).await,
        "StreamInput" => rpc::streaming(request, async |request| stream_input(&app, request).await).await,
        "List" => rpc::unary(request, async |_| Ok(list(&app))).await,
        "SendInput" => rpc::unary(request, async |body| send_input(&app, body).await).await,
        "SendSignal" => rpc::unary(request, async |body| send_signal(&app, body)).await,
        "Update" => rpc::unary(request, async |body| update(&app, body)).await,
        "CloseStdin" => rpc::unary(request, async |body| close_stdin(&app, body).await).await,
        other => answer::rpc_error(&rpc::no_such_method(other)),
    }
}

async fn start_process(app: &Rc<App>, request: Request<Incoming>) -> Result<Answer, RpcError> {
    let (headers, message) = rpc::single_message::<StartRequest>(request).await?;
    let user = app.rpc_user(&headers)?;
    let options = rpc::StreamOptions::of(&headers)?;
    // A task of its own: a client that leaves now must not leave half a process behind.
    let starting = tokio::task::spawn_local(start(app.clone(), user, message, options.deadline));
    let (process, subscription) = starting.await.map_err(|e| RpcError::internal(e.to_string()))??;
    Ok(answer::stream(EventStream::new(process.pid, subscription, options.keepalive, options.deadline)))
}

async fn connect(app: &Rc<App>, request: Request<Incoming>) -> Result<Answer, RpcError> {
    let (headers, message) = rpc::single_message::<SelectRequest>(request).await?;
    app.rpc_user(&headers)?;
    let options = rpc::StreamOptions::of(&headers)?;
    let process = app.processes.find(&message.process.selector()?)?;
    let subscription = process.broadcast.subscribe();
    Ok(answer::stream(EventStream::new(process.pid, subscription, options.keepalive, options.deadline)))
}

fn list(app: &App) -> Vec<u8> {
    let processes = app.processes.all();
    let infos = processes.iter().map(|p| ProcessInfo { config: &p.config, pid: p.pid, tag: p.tag.as_deref() });
    json::write(&ListResponse { processes: infos.collect() })
}

async fn send_input(app: &App, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    let message: SendInputRequest = json::parse(body)?;
    let process = app.processes.find(&message.process.selector()?)?;
    let input = message.input.input()?;
    process.input.lock().await.write(&input).await?;
    Ok(rpc::nothing())
}

fn send_signal(app: &App, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    let message: SendSignalRequest = json::parse(body)?;
    let (signal, tree) = (message.signal()?, message.tree);
    app.processes.find(&message.process.selector()?)?.signal(signal, tree)?;
    Ok(rpc::nothing())
}

fn update(app: &App, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    let message: UpdateRequest = json::parse(body)?;
    let process = app.processes.find(&message.process.selector()?)?;
    if let Some(size) = message.pty.and_then(|pty| pty.size) {
        process.resize(size)?;
    }
    Ok(rpc::nothing())
}

async fn close_stdin(app: &App, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    let message: SelectRequest = json::parse(body)?;
    let process = app.processes.find(&message.process.selector()?)?;
    process.input.lock().await.close()?;
    Ok(rpc::nothing())
}

/// Writes each message as it comes and answers when the client has sent its last.
async fn stream_input(app: &App, request: Request<Incoming>) -> Result<Answer, RpcError> {
    let mut messages = MessageReader::new(request.into_body());
    let result = pass_on_input(app, &mut messages).await;
    if result.is_err() {
        // The client is told at once, though it may still be sending.
        messages.drain_in_background();
    }
    result.map(|()| answer::stream_done())
}

async fn pass_on_input(app: &App, messages: &mut MessageReader) -> Result<(), RpcError> {
    let mut process: Option<Rc<Process>> = None;
    while let Some(payload) = messages.next().await? {
        match (json::parse::<StreamInputFields>(&payload)?.event()?, &process) {
            (StreamInput::Start(selector), None) => process = Some(app.processes.find(&selector)?),
            (StreamInput::Data(input), Some(process)) => process.input.lock().await.write(&input).await?,
            (StreamInput::Keepalive, Some(_)) => {}
            (StreamInput::Start(_), Some(_)) => return Err(RpcError::invalid("start was sent twice")),
            (_, None) => return Err(RpcError::invalid("the first message must be start")),
        }
    }
    match process {
        Some(_) => Ok(()),
        None => Err(RpcError::new(Code::InvalidArgument, "the first message must be start")),
    }
}
