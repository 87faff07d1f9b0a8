//! What the kernel's command line says to us.

use std::io;
use std::net::Ipv4Addr;

use crate::say;
use crate::supervisor::PowerOff;

/// The words that begin with `aenv.`; everything has a default.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CommandLine {
    pub root: String,
    pub root_type: String,
    pub address: Ipv4Addr,
    pub prefix: u8,
    pub gateway: Ipv4Addr,
    pub dns: Ipv4Addr,
    /// Memory the workload can never have.
    pub reserve_mib: u64,
    /// The image's own init, to run as the first process.
    pub init: Option<String>,
    pub power_off: PowerOff,
}

impl Default for CommandLine {
    fn default() -> Self {
        let gateway = Ipv4Addr::new(169, 254, 0, 22);
        Self {
            root: "/dev/vda".to_owned(),
            root_type: "ext4".to_owned(),
            address: Ipv4Addr::new(169, 254, 0, 21),
            prefix: 30,
            gateway,
            dns: gateway,
            reserve_mib: 24,
            init: None,
            power_off: PowerOff::PowerOff,
        }
    }
}

impl CommandLine {
    pub(super) fn read() -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/cmdline")?;
        let (line, bad) = Self::parse(&text);
        for word in bad {
            say!("{word} on the kernel command line is not understood");
        }
        Ok(line)
    }

    /// The settings, and the words that are ours but make no sense.
    fn parse(text: &str) -> (Self, Vec<&str>) {
        let mut line = Self::default();
        let bad =
            text.split_whitespace().filter(|word| word.starts_with("aenv.") && line.take(word).is_none()).collect();
        (line, bad)
    }

    fn take(&mut self, word: &str) -> Option<()> {
        let (name, value) = word.strip_prefix("aenv.")?.split_once('=')?;
        match name {
            "root" => value.clone_into(&mut self.root),
            "rootfstype" => value.clone_into(&mut self.root_type),
            "ip" => {
                let (address, prefix) = value.split_once('/')?;
                let prefix = prefix.parse().ok().filter(|p| (1..=32).contains(p))?;
                (self.address, self.prefix) = (address.parse().ok()?, prefix);
            }
            "gw" => self.gateway = value.parse().ok()?,
            "dns" => self.dns = value.parse().ok()?,
            "reserve" => self.reserve_mib = value.parse().ok()?,
            "init" => self.init = value.starts_with('/').then(|| value.to_owned()),
            "off" => {
                self.power_off = match value {
                    "poweroff" => PowerOff::PowerOff,
                    "reboot" => PowerOff::Reboot,
                    _ => return None,
                }
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_words_of_ours_everything_has_its_default() {
        assert_eq!(CommandLine::parse("console=hvc0 quiet panic=-1\n"), (CommandLine::default(), vec![]));
    }

    #[test]
    fn words_of_ours() {
        let text = "aenv.ip=10.0.0.2/24 aenv.gw=10.0.0.1 aenv.dns=9.9.9.9 aenv.reserve=32 aenv.init=/sbin/init aenv.root=/dev/vdb aenv.off=reboot";
        let (line, bad) = CommandLine::parse(text);
        assert!(bad.is_empty());
        assert_eq!((line.address, line.prefix), (Ipv4Addr::new(10, 0, 0, 2), 24));
        assert_eq!((line.gateway, line.dns), (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(9, 9, 9, 9)));
        assert_eq!((line.reserve_mib, line.init.as_deref(), line.root.as_str()), (32, Some("/sbin/init"), "/dev/vdb"));
        assert_eq!(line.power_off, PowerOff::Reboot);
    }

    #[test]
    fn nonsense_is_reported_and_changes_nothing() {
        let text = "aenv.ip=1.2.3.4 aenv.ip=1.2.3.4/40 aenv.gw=x aenv.reserve=-1 aenv.what=1 aenv.off=now";
        let (line, bad) = CommandLine::parse(text);
        assert_eq!(line, CommandLine::default());
        assert_eq!(bad.len(), 6);
    }
}
