//! How a path in a request becomes an absolute one.

/// Resolves *path* for a user: `~` and relative paths start at *home*, an empty one is *workdir* or else *home*.
///
/// `.`, `..` and doubled slashes are removed from the text, so the answer names what the request said
/// and not what a link may lead to.
pub fn resolve(path: &str, home: &str, workdir: Option<&str>) -> String {
    let joined = if path.is_empty() {
        workdir.unwrap_or(home).to_owned()
    } else if path.starts_with('/') {
        path.to_owned()
    } else if path == "~" {
        home.to_owned()
    } else if let Some(rest) = path.strip_prefix("~/") {
        format!("{home}/{rest}")
    } else {
        format!("{home}/{path}")
    };
    clean(&joined)
}

fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_form_of_path() {
        for (path, expected) in [
            ("/etc//hosts", "/etc/hosts"),
            ("~", "/home/user"),
            ("~/a", "/home/user/a"),
            ("a/./b/../c", "/home/user/a/c"),
            ("", "/srv"),
            ("../../../x", "/x"),
            ("~root", "/home/user/~root"),
            ("/", "/"),
        ] {
            assert_eq!(resolve(path, "/home/user", Some("/srv")), expected, "{path}");
        }
        assert_eq!(resolve("", "/home/user", None), "/home/user");
    }

    proptest! {
        #[test]
        fn the_answer_is_absolute_and_clean(path in "[a./~]{0,20}") {
            let answer = resolve(&path, "/h", None);
            prop_assert!(answer.starts_with('/'));
            prop_assert!(!answer.contains("//") && !answer.split('/').any(|p| p == "." || p == ".."));
            prop_assert_eq!(resolve(&answer, "/h", None), answer);
        }
    }
}
