//! One connection, from its greeting to its end.

use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::frame;
use crate::error::{Code, Error, Result};
use crate::node::{Service, Session};
use crate::protocol::{self, Answer, Call};

/// Calls of one connection in progress.
const MAX_CALLS: usize = 64;
/// A caller that does not take its answers for so long has hung up for all we know.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

struct Connection {
    session: Session,
    stream: UnixStream,
    /// Held while an answer is written, so that answers do not mix.
    writing: Mutex<()>,
    running: Mutex<usize>,
    done: Condvar,
}

pub(super) fn serve(stream: UnixStream, service: &Arc<Service>, ended: &mpsc::Sender<()>) {
    let _ = stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let Ok(reading) = stream.try_clone() else { return };
    let mut reading = BufReader::new(reading);
    let connection = Arc::new(Connection {
        session: Session::default(),
        stream,
        writing: Mutex::default(),
        running: Mutex::new(0),
        done: Condvar::new(),
    });
    let mut greeted = false;
    while let Ok(Some(bytes)) = frame::read(&mut reading) {
        let Some(request) = protocol::parse(&bytes) else { break };
        match request.call {
            Err(error) => connection.answer(request.id, Err(error)),
            Ok(Call::Hello { protocol }) => {
                greeted = protocol == protocol::VERSION;
                connection.answer(request.id, greet(service, protocol));
            }
            Ok(_) if !greeted => connection.answer(request.id, Err(Error::invalid("hello comes first"))),
            Ok(call) => connection.start(service, ended, request.id, call),
        }
    }
    // What the connection made is held until the last of its calls is done, too: they have a part in it.
    let _ = connection.stream.shutdown(std::net::Shutdown::Read);
}

fn greet(service: &Service, protocol: u32) -> Result<Value> {
    if protocol == protocol::VERSION {
        return Ok(service.greeting());
    }
    let message = format!("protocol {protocol}; this daemon speaks {}", protocol::VERSION);
    Err(Error::new(Code::Unsupported, message))
}

impl Connection {
    /// Does *call* on a thread of its own, once there are few enough.
    fn start(self: &Arc<Self>, service: &Arc<Service>, ended: &mpsc::Sender<()>, id: u64, call: Call) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        while *running >= MAX_CALLS {
            running = self.done.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
        *running += 1;
        drop(running);
        let (connection, service, ended) = (Arc::clone(self), Arc::clone(service), ended.clone());
        let started = thread::Builder::new().name("call".into()).spawn(move || {
            let ends = matches!(call, Call::Shutdown {});
            let result = service.call(&connection.session, call);
            connection.answer(id, result);
            if ends {
                // Fails when the daemon is ending already.
                let _ = ended.send(());
            }
            connection.finished();
        });
        if let Err(error) = started {
            self.answer(id, Err(Error::io("no thread for a call", error)));
            self.finished();
        }
    }

    fn finished(&self) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.done.notify_all();
    }

    fn answer(&self, id: u64, result: Result<Value>) {
        let bytes = serde_json::to_vec(&Answer::new(id, result)).unwrap_or_default();
        let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if frame::write(&mut &self.stream, &bytes).is_err() {
            // Half an answer may be on its way: nothing can follow it.
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
