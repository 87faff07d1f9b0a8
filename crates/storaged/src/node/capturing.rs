//! Memory of processes: what one changed in the image that it maps.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::{Node, memory_name};
use crate::device::{Device, Kind};
use crate::error::{Code, Context, Error, Result};
use crate::image::captured::{self, Source};
use crate::image::memory::Memory;
use crate::library::Held;
use crate::memory::maps::{Backing, Image};
use crate::memory::process::Process;
use crate::merger::MEMORY_DEPTH;
use crate::names::Owner;
use crate::protocol::{Compression, Stack};

impl Node {
    /// What process *pid* changed in the memory that *owner* has attached, as a layer on its stack; and how
    /// many bytes that is. The process stands still meanwhile, which is the caller's to see to.
    ///
    /// # Errors
    /// `not_found` if nothing is attached; `unavailable` if the process is gone or does not map the memory;
    /// `no_space` without room.
    pub fn capture_memory(&self, owner: &Owner, pid: i32, compression: Compression) -> Result<(Stack, Held, u64)> {
        let _turn = self.owners.lock(owner);
        let memory = self.attached(owner)?;
        self.settle_memory(&memory)?;
        let image = self.mapped(&memory)?;
        let process = Process::open(pid)?;
        let source = Source { process: &process, image: &image, stack: memory.stack() };
        let (stack, held, captured) = captured::write(&self.parts, &source, compression)?;
        self.merger.ask(&stack, MEMORY_DEPTH);
        Ok((stack, held, captured.data_bytes + captured.zero_bytes))
    }

    pub(super) fn attached(&self, owner: &Owner) -> Result<Arc<Memory>> {
        let memory = self.images().attached.get(owner).cloned();
        memory.ok_or_else(|| Error::new(Code::NotFound, format!("{owner} has no memory attached")))
    }

    /// How a process that maps *memory* shows it: by file, since a jailed one knows another path.
    pub(super) fn mapped(&self, memory: &Memory) -> Result<Image> {
        if self.front().is_none() {
            return Err(Error::new(Code::Unsupported, "this daemon shows no memory that a process could map"));
        }
        let path = self.path(Kind::Memory, &memory_name(memory.device()));
        let seen = path.metadata().during(format_args!("cannot look at {}", path.display()))?;
        let device = (rustix::fs::major(seen.dev()), rustix::fs::minor(seen.dev()));
        Ok(Image { backing: Backing::Inode { device, inode: seen.ino() }, size_bytes: memory.size_bytes() })
    }
}
