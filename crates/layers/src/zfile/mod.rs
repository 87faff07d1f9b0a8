//! zfile: blocks compressed one by one, so that any of them can be read alone.
//!
//! ```text
//! header 512 | block, block, ... each with its checksum | lengths of the blocks, u32 | trailer 512
//! ```

mod codec;
mod header;
mod reader;
mod writer;

pub use codec::Algorithm;
pub use header::ZFileOptions;
pub use reader::ZFile;
pub use writer::ZFileWriter;
