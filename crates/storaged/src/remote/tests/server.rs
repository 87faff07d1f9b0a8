//! A server of files that does as it is told: also what no server should.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Clone, Debug)]
pub(super) enum Fault {
    Status(u16),
    /// Says nothing until the other side goes away.
    Silence,
    /// So many bytes of the body, and then the same.
    StallAfter(usize),
    /// So many bytes of the body, and then the end of the connection.
    CutAfter(usize),
    /// 200 and everything.
    Everything,
    /// The right header, and bytes from elsewhere.
    WrongBytes,
    /// Header and bytes of a range that was not asked for.
    WrongRange,
    /// Half of what was asked for, and says so.
    Half,
    /// Another size of the whole.
    Size(u64),
    Tag(&'static str),
    /// A header line more.
    Header(&'static str),
    /// Nothing about the range.
    NoRange,
    /// A byte at a time, for ever.
    Trickle,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Asked {
    /// Path and query.
    pub(super) target: String,
    /// Names in lower case.
    pub(super) headers: HashMap<String, String>,
}

type Special = Box<dyn Fn(&Asked) -> Option<(u16, Vec<String>, Vec<u8>)> + Send + Sync>;

#[derive(Default)]
struct State {
    files: HashMap<String, Arc<Vec<u8>>>,
    /// For the next requests, one each.
    next: VecDeque<Fault>,
    /// For all others.
    always: Option<Fault>,
    asked: Vec<Asked>,
    /// Requests are answered.
    closed: bool,
    special: Option<Arc<Special>>,
}

#[derive(Clone)]
pub(super) struct Server {
    pub(super) address: String,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl Server {
    pub(super) fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("http://{}", listener.local_addr()?);
        let server = Self { address, state: Arc::default() };
        let it = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = it.clone();
                std::thread::spawn(move || server.serve(&stream));
            }
        });
        Ok(server)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put(&self, path: &str, content: Vec<u8>) {
        self.state().files.insert(path.to_owned(), Arc::new(content));
    }

    pub(super) fn next(&self, fault: Fault) {
        self.state().next.push_back(fault);
    }

    pub(super) fn always(&self, fault: Option<Fault>) {
        self.state().always = fault;
    }

    /// What answers instead of files, where it says something.
    pub(super) fn special(&self, with: impl Fn(&Asked) -> Option<(u16, Vec<String>, Vec<u8>)> + Send + Sync + 'static) {
        self.state().special = Some(Arc::new(Box::new(with)));
    }

    pub(super) fn asked(&self) -> Vec<Asked> {
        self.state().asked.clone()
    }

    /// Requests wait until it is opened again.
    pub(super) fn close(&self, closed: bool) {
        self.state().closed = closed;
        self.state.1.notify_all();
    }

    /// Waits for so many requests in all.
    pub(super) fn wait_asked(&self, count: usize) {
        let mut state = self.state();
        while state.asked.len() < count {
            state = self.state.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn serve(&self, stream: &TcpStream) {
        let Ok(reading) = stream.try_clone() else { return };
        let mut reading = BufReader::new(reading);
        while let Some(asked) = read_request(&mut reading) {
            let fault = {
                let mut state = self.state();
                state.asked.push(asked.clone());
                self.state.1.notify_all();
                while state.closed {
                    state = self.state.1.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                state.next.pop_front().or_else(|| state.always.clone())
            };
            if self.answer(stream, &asked, fault.as_ref()).is_none() {
                let _ = stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    /// Nothing if the connection is to end.
    fn answer(&self, mut stream: &TcpStream, asked: &Asked, fault: Option<&Fault>) -> Option<()> {
        let special = self.state().special.clone();
        if let Some((status, headers, body)) = special.and_then(|special| special(asked)) {
            let headers = headers.iter().fold(String::new(), |all, line| all + line + "\r\n");
            let head = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
            return stream.write_all(&[head.as_bytes(), &body].concat()).ok();
        }
        let path = asked.target.split('?').next()?;
        let Some(file) = self.state().files.get(path).cloned() else {
            return stream.write_all(b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n").ok();
        };
        let size = file.len() as u64;
        let range = asked.headers.get("range").and_then(|text| parse_range(text, size))?;
        let mut said = range.clone();
        let (mut size_said, mut tag, mut more) = (size, "\"one\"", String::new());
        let mut body = bytes(&file, &range);
        match fault {
            Some(Fault::Status(status)) => {
                return stream.write_all(format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n").as_bytes()).ok();
            }
            Some(Fault::Silence) => return wait_for_end(stream),
            Some(Fault::Everything) => {
                let head = format!("HTTP/1.1 200 x\r\nContent-Length: {size}\r\n\r\n");
                return stream.write_all(&[head.as_bytes(), &file].concat()).ok();
            }
            Some(Fault::WrongBytes) => body.iter_mut().for_each(|byte| *byte ^= 0x55),
            Some(Fault::WrongRange) => {
                said = if range.start > 0 { range.start - 1..range.end - 1 } else { 1..range.end };
                body = bytes(&file, &said);
            }
            Some(Fault::Half) => {
                said.end = range.start + (range.end - range.start).div_ceil(2);
                body = bytes(&file, &said);
            }
            Some(Fault::Size(other)) => size_said = *other,
            Some(Fault::Tag(other)) => tag = other,
            Some(Fault::Header(line)) => more = format!("{line}\r\n"),
            _ => (),
        }
        let mut head = format!("HTTP/1.1 206 x\r\nETag: {tag}\r\nContent-Length: {}\r\n{more}", body.len());
        if !matches!(fault, Some(Fault::NoRange)) {
            head = format!("{head}Content-Range: bytes {}-{}/{size_said}\r\n", said.start, said.end - 1);
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
        match fault {
            Some(Fault::CutAfter(count)) => {
                stream.write_all(&body[..body.len().min(*count)]).ok()?;
                None
            }
            Some(Fault::StallAfter(count)) => {
                stream.write_all(&body[..body.len().min(*count)]).ok()?;
                wait_for_end(stream)
            }
            Some(Fault::Trickle) => {
                for byte in body.chunks(1) {
                    stream.write_all(byte).ok()?;
                    std::thread::sleep(std::time::Duration::from_millis(20)); // the fault itself
                }
                Some(())
            }
            _ => stream.write_all(&body).ok(),
        }
    }
}

fn bytes(file: &[u8], range: &Range<u64>) -> Vec<u8> {
    let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(file.len());
    file[place(range.start)..place(range.end)].to_vec()
}

fn wait_for_end(mut stream: &TcpStream) -> Option<()> {
    let _ = stream.read(&mut [0; 1]);
    None
}

fn parse_range(text: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    Some(first..(last + 1).min(size))
}

fn read_request(from: &mut impl BufRead) -> Option<Asked> {
    let mut line = String::new();
    from.read_line(&mut line).ok().filter(|read| *read > 0)?;
    let target = line.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    Some(Asked { target, headers })
}
