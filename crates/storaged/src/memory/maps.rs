//! Where a process has mapped a memory image, read from its maps file. Pure.
//!
//! A VMM may map an image in several pieces, and a balloon may have put anonymous memory
//! over parts of it: those parts read as zeros where nothing was written since, and no
//! longer as the image.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::error::{Code, Error};

/// One mapping of a process: addresses [start, end), and what is behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    pub start: u64,
    pub end: u64,
    pub executable: bool,
    pub shared: bool,
    /// In the file, in bytes.
    pub offset: u64,
    pub device: (u32, u32),
    /// 0: anonymous.
    pub inode: u64,
    pub path: Vec<u8>,
}

impl Vma {
    fn is_anonymous(&self) -> bool {
        self.inode == 0 && (self.path.is_empty() || self.path.starts_with(b"[anon"))
    }
}

/// What tells the mappings of an image from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Its path, as the process that asks sees it.
    Path(PathBuf),
    /// Its file system and file, whatever path it was opened by (a jailed VMM sees another one).
    Inode { device: (u32, u32), inode: u64 },
}

/// A memory image that a process maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub backing: Backing,
    pub size_bytes: u64,
}

/// A part of an image in the address space of a process: addresses [start, end) hold the image from *offset* on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    /// Anonymous memory lies over it, so pages that are not there are zeros.
    pub zeroed: bool,
}

impl Area {
    pub fn length(&self) -> u64 {
        self.end - self.start
    }

    /// The byte of the image that is at *address*.
    pub fn to_offset(&self, address: u64) -> u64 {
        address - self.start + self.offset
    }
}

/// The mappings that *text*, the content of a maps file, lists; in order of address.
///
/// # Errors
/// `bug` for a line that makes no sense.
pub fn parse(text: &[u8]) -> Result<Vec<Vma>, Error> {
    let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                let shown = String::from_utf8_lossy(&line[..line.len().min(200)]).into_owned();
                Error::new(Code::Bug, format!("a line of a maps file makes no sense: {shown}"))
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Vma> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let mut field = || fields.next().and_then(|field| std::str::from_utf8(field).ok());
    let (start, end) = field()?.split_once('-')?;
    let flags = field()?;
    let offset = field()?;
    let (major, minor) = field()?.split_once(':')?;
    let inode = field()?;
    let path = fields.next().unwrap_or_default().trim_ascii();
    let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
    (start < end && flags.len() == 4).then_some(())?;
    Some(Vma {
        start,
        end,
        executable: flags.contains('x'),
        shared: flags.ends_with('s'),
        offset: hexadecimal(offset)?,
        device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode: inode.parse().ok()?,
        path: path.to_vec(),
    })
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// The areas that together hold bytes [0, size) of *image*, lowest first. *vmas* are in order of address.
///
/// # Errors
/// `unavailable` if the image is not mapped in full; `conflict` if it is mapped shared (guests would
/// write into what others start from), twice, or off the page grid.
pub fn find_areas(vmas: &[Vma], image: &Image) -> Result<Vec<Area>, Error> {
    let mut mapped: Vec<&Vma> =
        vmas.iter().filter(|vma| is_of(vma, &image.backing) && vma.offset < image.size_bytes).collect();
    mapped.sort_by_key(|vma| vma.offset);
    if mapped.is_empty() {
        return Err(Error::new(Code::Unavailable, "the process does not map this memory"));
    }
    if mapped.iter().any(|vma| vma.shared) {
        return Err(Error::new(Code::Conflict, "the memory image is mapped shared"));
    }
    let anonymous: Vec<&Vma> = vmas.iter().filter(|vma| vma.is_anonymous()).collect();
    let mut areas: Vec<Area> = Vec::new();
    let mut at = 0;
    for vma in mapped {
        if vma.offset < at {
            return Err(Error::new(Code::Conflict, "the memory image is mapped twice"));
        }
        let before = areas.last().map(base_of);
        fill_gap(&mut areas, at..vma.offset, [before, vma.start.checked_sub(vma.offset)], &anonymous)?;
        let length = (vma.end - vma.start).min(image.size_bytes - vma.offset);
        areas.push(Area { start: vma.start, end: vma.start + length, offset: vma.offset, zeroed: false });
        at = vma.offset + length;
    }
    let before = areas.last().map(base_of);
    fill_gap(&mut areas, at..image.size_bytes, [before, None], &anonymous)?;
    if areas.iter().any(|area| (area.start | area.end | area.offset) % super::PAGE_BYTES != 0) {
        return Err(Error::new(Code::Conflict, "the memory image is not mapped in whole pages"));
    }
    Ok(areas)
}

fn is_of(vma: &Vma, backing: &Backing) -> bool {
    match backing {
        Backing::Inode { device, inode } => vma.inode == *inode && vma.device == *device,
        Backing::Path(path) => {
            let shown = vma.path.strip_suffix(b" (deleted)").unwrap_or(&vma.path);
            let path = path.as_os_str().as_bytes();
            // A line feed is the one character that the kernel escapes.
            let escaped = path.contains(&b'\n').then(|| {
                path.iter()
                    .flat_map(|byte| if *byte == b'\n' { b"\\012".as_slice() } else { std::slice::from_ref(byte) })
            });
            let same = escaped.map_or(shown == path, |escaped| escaped.eq(shown));
            vma.inode != 0 && (same || vma.path == path)
        }
    }
}

/// The address that byte 0 of the image would have if it continued *area*. Wraps for an area of low address.
fn base_of(area: &Area) -> u64 {
    area.start.wrapping_sub(area.offset)
}

/// Covers the image bytes *gap* with anonymous memory next to the piece before or after it, whose bases are given.
fn fill_gap(
    areas: &mut Vec<Area>,
    gap: std::ops::Range<u64>,
    bases: [Option<u64>; 2],
    anonymous: &[&Vma],
) -> Result<(), Error> {
    let mut at = gap.start;
    for base in bases.into_iter().flatten() {
        let Some(end) = base.checked_add(gap.end) else { continue };
        // A balloon may leave thousands of gaps, so each looks only at what lies in it.
        let first = anonymous.partition_point(|vma| vma.end <= base.wrapping_add(at));
        for vma in &anonymous[first..] {
            let (low, high) = (vma.start.max(base.wrapping_add(at)), vma.end.min(end));
            if low != base.wrapping_add(at) || low >= high {
                break;
            }
            areas.push(Area { start: low, end: high, offset: at, zeroed: true });
            at = high - base;
        }
    }
    if at < gap.end {
        return Err(Error::new(Code::Unavailable, format!("bytes {at} to {} of the memory are not mapped", gap.end)));
    }
    Ok(())
}
