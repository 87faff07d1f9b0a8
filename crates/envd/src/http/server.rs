//! The listening socket and its connections.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::route::answer;
use crate::app::App;
use crate::say;

const BACKLOG: u32 = 1024;
/// Open connections from outside the sandbox.
const MAX_CONNECTIONS: usize = 8192;
/// Open connections from inside it, so that the workload cannot use up all of them.
const MAX_LOCAL_CONNECTIONS: usize = 1024;
/// Clients keep idle connections for five minutes; the server must not be the first to give up.
const IDLE_LIMIT: Duration = Duration::from_secs(660);
/// Bytes buffered for one connection in each direction.
const BUFFER_BYTES: usize = 64 << 10;
/// A pause after the kernel had no descriptor or memory for a connection.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// # Errors
/// When the address is in use or not ours.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Answers connections for ever.
pub(crate) async fn serve(app: Rc<App>, listener: TcpListener) {
    let counts = Rc::new(Counts::default());
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // A connection over the limit is closed by dropping it.
                if let Some(seat) = Seat::take(&counts, is_local(peer.ip())) {
                    tokio::task::spawn_local(connection(app.clone(), stream, seat));
                }
            }
            Err(error) => {
                say!("no connection can be accepted: {error}");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn connection(app: Rc<App>, stream: TcpStream, seat: Seat) {
    let _ = stream.set_nodelay(true);
    let from_inside = seat.local;
    let service = service_fn(|request| {
        let app = app.clone();
        async move { Ok::<_, Infallible>(answer(app, from_inside, request).await) }
    });
    // A client that breaks off is no event; its handlers are dropped with the connection.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_LIMIT)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

fn is_local(peer: IpAddr) -> bool {
    let own = IpAddr::V4(Ipv4Addr::new(169, 254, 0, 21));
    peer.is_loopback() || peer == own
}

#[derive(Default)]
struct Counts {
    local: Cell<usize>,
    outside: Cell<usize>,
}

/// One of the connections that may be open.
struct Seat {
    counts: Rc<Counts>,
    local: bool,
}

impl Seat {
    fn take(counts: &Rc<Counts>, local: bool) -> Option<Self> {
        let seat = Self { counts: counts.clone(), local };
        let taken = seat.count().get() + 1;
        seat.count().set(taken);
        // Dropping a seat gives it back, also this one.
        (taken <= if local { MAX_LOCAL_CONNECTIONS } else { MAX_CONNECTIONS }).then_some(seat)
    }

    fn count(&self) -> &Cell<usize> {
        if self.local { &self.counts.local } else { &self.counts.outside }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.count().set(self.count().get() - 1);
    }
}
