//! The FUSE front end over plain files: for tests that kill it, and for figures without layers below.
//!
//! `fuse_plain keep`, or `fuse_plain serve MOUNT KEEPER [readers=N] [channels=N] [ahead=KIB] [direct] disk:NAME=FILE memory:NAME=FILE …`.
//! It says `ready START` and then obeys lines: `statistics`, `remove NAME`, `stop`, `unmount`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use storaged::device::{Answer, Device, DeviceId, Kind};
use storaged::directory::{Directory, Named};
use storaged::fuse::{Front, Options};
use storaged::keeper;

/// On x86-64.
const O_DIRECT: i32 = 0o40_000;

struct Plain {
    file: File,
    kind: Kind,
    size_bytes: u64,
    direct: bool,
}

impl Device for Plain {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        if self.direct {
            return Ok(Answer::WouldWait);
        }
        let length = buf.len();
        match preadv2(&self.file, &mut [IoSliceMut::new(buf)], offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == length => Ok(Answer::Done),
            Ok(_) | Err(Errno::AGAIN) => Ok(Answer::WouldWait),
            Err(error) => Err(error.into()),
        }
    }

    fn write(&self, buf: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        self.file.write_all_at(buf, offset)?;
        if durable { self.file.sync_data() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(fallocate(self.file.as_fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)?)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[derive(Default)]
struct Table(RwLock<BTreeMap<DeviceId, (String, Arc<Plain>)>>);

impl Directory for Table {
    fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>> {
        let table = self.0.read().ok()?;
        table.get(&id).map(|(_, device)| Arc::clone(device) as Arc<dyn Device>)
    }

    fn find(&self, kind: Kind, name: &str) -> Option<DeviceId> {
        let table = self.0.read().ok()?;
        table.iter().find(|(_, (known, device))| known == name && device.kind == kind).map(|(id, _)| *id)
    }

    fn list(&self, kind: Kind, after: Option<DeviceId>, limit: usize) -> Vec<Named> {
        let Ok(table) = self.0.read() else { return Vec::new() };
        let entries = table.iter().filter(|(id, (_, device))| Some(**id) > after && device.kind == kind);
        entries.take(limit).map(|(id, (name, _))| Named { id: *id, name: name.clone() }).collect()
    }
}

impl Table {
    fn add(&self, place: u64, kind: Kind, name: &str, path: &str, direct: bool) -> io::Result<()> {
        let flags = if direct { O_DIRECT } else { 0 };
        let file = File::options().read(true).write(kind == Kind::Disk).custom_flags(flags).open(path)?;
        let size_bytes = file.metadata()?.len();
        if !direct {
            // What is read at random is not read ahead: the guest's own kernel knows better.
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
        }
        let id = DeviceId(NonZeroU64::MIN.saturating_add(place));
        let plain = Plain { file, kind, size_bytes, direct };
        self.0.write().map_err(|_| io::ErrorKind::Other)?.insert(id, (name.to_owned(), Arc::new(plain)));
        Ok(())
    }

    fn remove(&self, name: &str) -> Option<(DeviceId, Kind)> {
        let mut table = self.0.write().ok()?;
        let found = table.iter().find(|(_, (known, _))| known == name).map(|(id, (_, device))| (*id, device.kind));
        found.inspect(|(id, _)| drop(table.remove(id)))
    }
}

fn serve(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [mount, socket, rest @ ..] = arguments else { return Err("serve MOUNT KEEPER …".into()) };
    let mut options = Options::new(mount.into(), socket.into());
    let table = Arc::new(Table::default());
    let mut direct = false;
    for (place, argument) in (0..).zip(rest) {
        match argument.split_once('=') {
            None if argument == "direct" => direct = true,
            Some(("readers", count)) => options.readers = count.parse()?,
            Some(("channels", count)) => options.channels = count.parse()?,
            Some(("ahead", kib)) => options.read_ahead_kib = kib.parse()?,
            Some((name, path)) => match name.split_once(':') {
                Some(("disk", name)) => table.add(place, Kind::Disk, name, path, direct)?,
                Some(("memory", name)) => table.add(place, Kind::Memory, name, path, direct)?,
                _ => return Err(name.into()),
            },
            None => return Err(argument.as_str().into()),
        }
    }
    let (front, start) = Front::start(&options, Arc::clone(&table) as Arc<dyn Directory>)?;
    println!("ready {start:?}");
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ') {
            None if line == "statistics" => println!("{}", serde_json::to_string(&front.statistics())?),
            None if line == "stop" => {
                println!("stopped {}", front.stop(Duration::from_secs(30)));
                return Ok(());
            }
            None if line == "unmount" => {
                front.unmount()?;
                println!("unmounted");
                return Ok(());
            }
            Some(("remove", name)) => {
                if let Some((id, kind)) = table.remove(name) {
                    front.removed(kind, name, id);
                }
                println!("removed");
            }
            _ => println!("what?"),
        }
    }
    front.stop(Duration::from_secs(30));
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.split_first() {
        Some((first, _)) if first == "keep" => keeper::main().map_err(Into::into),
        Some((first, rest)) if first == "serve" => serve(rest),
        _ => Err("keep or serve".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
