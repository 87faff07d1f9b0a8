//! `storaged serve --root DIR --socket PATH`: the daemon, which says `serving` on its
//! standard output once it can be asked. `storaged keep`: see [`storaged::keeper`].

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use storaged::directory::Directory;
use storaged::error::{Code, Context, Error, Result};
use storaged::fuse::{Front, Options};
use storaged::node::{Node, Service};
use storaged::{keeper, remote, server, ublk};

const USAGE: &str = "usage: storaged serve --root DIR --socket PATH [--mount DIR] [--keeper PATH] [--freeze-limit-mib N]\n           [--disks fuse|ublk|probe] [--cache DIR] [--cache-bytes N] [--authorities FILE] [--remote-patience-s N]\n       storaged keep";
/// How long requests in progress may take at the end. The next daemon does again what was not done.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// How long the last read of a replay may take; what it has open keeps the mount.
const REPLAY_LIMIT: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

struct Arguments {
    root: PathBuf,
    socket: PathBuf,
    mount: PathBuf,
    keeper: PathBuf,
    freeze_limit_bytes: u64,
    disks: Disks,
    remote: remote::Options,
}

/// How guests see their disks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disks {
    Fuse,
    Ublk,
    /// As block devices where this kernel can, else as files.
    Probe,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.split_first() {
        Some((&"keep", [])) => keeper::main().during("the keeper"),
        Some((&"serve", rest)) => match parse(rest) {
            Some(arguments) => serve(&arguments),
            None => return usage(),
        },
        _ => return usage(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("storaged: {error}");
            // So that whoever starts us knows another one from a failure.
            ExitCode::from(if error.code == Code::Conflict { 75 } else { 1 })
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn parse(words: &[&str]) -> Option<Arguments> {
    let (mut root, mut socket, mut mount, mut keeper) = (None, None, None, None);
    let mut freeze_limit_bytes = u64::MAX;
    let mut disks = Disks::Fuse;
    let mut remote = remote::Options::default();
    for pair in words.chunks(2) {
        let [name, value] = pair else { return None };
        let path = Some(PathBuf::from(value));
        match *name {
            "--root" => root = path,
            "--socket" => socket = path,
            "--mount" => mount = path,
            "--keeper" => keeper = path,
            "--freeze-limit-mib" => freeze_limit_bytes = value.parse::<u64>().ok()?.checked_mul(MIB)?,
            "--cache" => remote.cache = path,
            "--cache-bytes" => remote.cache_bytes = value.parse().ok()?,
            "--authorities" => remote.authorities = path,
            "--remote-patience-s" => {
                let seconds = value.parse().ok().filter(|seconds| (1..=3600).contains(seconds))?;
                remote.patience = Duration::from_secs(seconds);
            }
            "--disks" => {
                disks = match *value {
                    "fuse" => Disks::Fuse,
                    "ublk" => Disks::Ublk,
                    "probe" => Disks::Probe,
                    _ => return None,
                };
            }
            _ => return None,
        }
    }
    let root: PathBuf = root?;
    let mount = mount.unwrap_or_else(|| root.join("mount"));
    let keeper = keeper.unwrap_or_else(|| root.join("keeper.sock"));
    Some(Arguments { root, socket: socket?, mount, keeper, freeze_limit_bytes, disks, remote })
}

fn serve(arguments: &Arguments) -> Result<()> {
    // The daemon outlives whoever starts it: a pipe of theirs, held here, would look as if they still ran.
    sys::inherit::close_all_but_standard();
    // Before there are threads, so that all of them hold the signals back.
    let signals = sys::signals::Blocked::new(&[SIGINT, SIGTERM]).during("signals")?;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).during("cannot raise the open files")?;

    let node = Arc::new(
        Node::open_with(&arguments.root, arguments.remote.clone())?.limit_freezing(arguments.freeze_limit_bytes),
    );
    let options = Options::new(arguments.mount.clone(), arguments.keeper.clone());
    let (front, start) = Front::start(&options, Arc::clone(&node) as Arc<dyn Directory>)?;
    node.show_through(front);
    show_disks(&node, arguments)?;
    let service = Arc::new(Service::new(Arc::clone(&node)).mounted(start));
    let (ended, ending) = mpsc::channel();
    let listener = server::listen(&arguments.socket)?;
    server::serve(listener, Arc::clone(&service), ended.clone()).during("cannot serve")?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            while signals.wait(None).is_none() {}
            let _ = ended.send(());
        })
        .during("cannot wait for signals")?;
    eprintln!("storaged: serving {} at {}, {start:?}", arguments.root.display(), arguments.socket.display());
    // Whoever started us may be gone already.
    let _ = writeln!(std::io::stdout(), "serving");

    ending.recv().map_err(|_| Error::new(Code::Bug, "nobody can end this daemon"))?;
    service.end();
    node.stop_replays(REPLAY_LIMIT);
    if let Some(front) = node.front() {
        // Whoever has a path, or an image open, keeps the mount, and goes on with the next daemon.
        let gone = !node.in_use() && front.unmount().is_ok();
        if !gone && !front.stop(STOP_LIMIT) {
            eprintln!("storaged: some requests are left to the next daemon");
        }
    }
    if let Some(blocks) = node.blocks()
        && !blocks.stop(STOP_LIMIT)
    {
        eprintln!("storaged: some requests of block devices are left to the next daemon");
    }
    node.flush_all();
    node.keep_cached();
    Ok(())
}

fn show_disks(node: &Arc<Node>, arguments: &Arguments) -> Result<()> {
    let tag = arguments.root.join("ublk");
    if arguments.disks == Disks::Fuse && !tag.exists() {
        return Ok(());
    }
    match ublk::Front::start(&ublk::Options::new(tag), Arc::clone(node) as Arc<dyn Directory>) {
        // What an earlier daemon showed as block devices stays so until nobody uses any of them.
        Ok((_, start)) if arguments.disks == Disks::Fuse && start.taken_over.is_empty() => Ok(()),
        Ok((blocks, start)) => {
            eprintln!("storaged: disks are block devices, {start:?}");
            node.show_disks_through(blocks);
            Ok(())
        }
        Err(error) if error.code == Code::Unsupported && arguments.disks != Disks::Ublk => {
            eprintln!("storaged: disks are files: {error}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}
