//! Looking at every byte of a file that claims to be a layer.

use std::io;

use crate::error::{Corruption, Error, Result};
use crate::format::Format;
use crate::header::Identity;
use crate::index::Limits;
use crate::layer::Layer;
use crate::source::{ReadAt, read, size};
use crate::zfile::ZFile;
use crate::{BLOCK, BLOCK_LEN, SECTOR, SECTOR_LEN};

/// What a layer that is right consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub identity: Identity,
    /// The layer is inside a zfile.
    pub compressed: bool,
    /// Mappings, padding not included.
    pub mappings: u64,
    /// Bytes of the view that are mapped to data.
    pub data_bytes: u64,
    /// Bytes of the view that are mapped to zeros.
    pub zeroed_bytes: u64,
    /// Bytes of data in the file that nothing maps: what a compaction would save.
    pub unused_bytes: u64,
}

/// Checks the whole of a sealed layer: both ends, every mapping, what fills the gaps, and that
/// every byte can be read; in a zfile also every checksum. An LSMT layer alone has no checksum of
/// its data: compare a digest of the file for that.
///
/// # Errors
/// As for [`Layer::open`] and [`ZFile::open`], and for the first byte that is wrong.
pub fn verify<S: ReadAt>(source: S, limits: Limits) -> Result<Report> {
    match Format::of(&source)? {
        Format::ZFile => verify_layer(ZFile::open_within(source, limits)?, true, limits),
        Format::Layer | Format::Other => verify_layer(source, false, limits),
    }
}

fn verify_layer<S: ReadAt>(source: S, compressed: bool, limits: Limits) -> Result<Report> {
    let layer = Layer::open_within(source, limits)?;
    let bytes = size(layer.source())?;
    let index_end = layer.data_end() + layer.index_count() * 16;
    check_filler(layer.source(), index_end, bytes - BLOCK)?;
    read_all(layer.source(), bytes)?;

    let segments = layer.index().segments();
    let sum = |zeroed: bool| -> u64 {
        let of_kind = segments.iter().filter(|segment| segment.is_zeroed() == zeroed);
        of_kind.map(|segment| segment.length() * SECTOR).sum()
    };
    Ok(Report {
        identity: layer.identity().clone(),
        compressed,
        mappings: segments.len() as u64,
        data_bytes: sum(false),
        zeroed_bytes: sum(true),
        unused_bytes: (layer.data_end() - BLOCK).saturating_sub(used_bytes(&layer)),
    })
}

/// Bytes of the file that some mapping points to; two may point to the same ones.
fn used_bytes<S: ReadAt>(layer: &Layer<S>) -> u64 {
    let data = layer.index().segments().iter().filter(|segment| !segment.is_zeroed());
    let mut runs: Vec<_> = data.map(|segment| (segment.moffset(), segment.moffset() + segment.length())).collect();
    runs.sort_unstable();
    let mut end = 0;
    let mut used = 0;
    for (from, to) in runs {
        used += to.saturating_sub(from.max(end));
        end = end.max(to);
    }
    used * SECTOR
}

/// Between index and trailer are ones up to the sector, then zeros; or zeros alone.
fn check_filler<S: ReadAt + ?Sized>(source: &S, from: u64, to: u64) -> Result<()> {
    let length = usize::try_from(to - from).ok().filter(|length| *length < 2 * BLOCK_LEN);
    let wrong = || Error::from(Corruption::Padding { what: "layer" });
    let mut filler = vec![0; length.ok_or_else(wrong)?];
    read(source, &mut filler, from)?;
    let ones = filler.iter().take_while(|byte| **byte == 0xff).count();
    if ones >= SECTOR_LEN || filler[ones..].iter().any(|byte| *byte != 0) {
        return Err(wrong());
    }
    Ok(())
}

fn read_all<S: ReadAt + ?Sized>(source: &S, bytes: u64) -> Result<()> {
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    while at < bytes {
        let part = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(buf.len());
        match source.read_exact_at(&mut buf[..part], at) {
            // Somebody else's signal, not the file's fault.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            done => done.map_err(|error| Error::read(at, part, error))?,
        }
        at += part as u64;
    }
    Ok(())
}
