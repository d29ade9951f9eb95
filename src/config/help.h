// The texts in which a program describes itself, all made from the schema.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

// Returns the answer to --help: usage, every flag of `program` with its default and meaning, the
// rules of environment and file, and examples. Lines have at most 100 columns.
std::string HelpText(std::string_view program);

// Returns the answer to --version: "sluice-server 0.1.0".
std::string VersionText(std::string_view program);

// Returns the table of settings in configs/README.md, one line per setting. A test compares them.
std::string ConfigTableMarkdown();

}  // namespace sluice
