"""Write workbooks from rows of values as Excel and LibreOffice do."""

import io
import zipfile
from xml.sax.saxutils import escape


class Cell(str):
    """A cell as XML; in XLSX, `{at}` stands for its name."""


def workbook(*sheets):
    """A workbook with a sheet per list of rows, as Excel writes it: inline texts, plain numbers."""
    files = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/'
        'content-types"><Default Extension="xml" ContentType="application/vnd.openxmlformats-'
        'officedocument.spreadsheetml.sheet.main+xml"/></Types>',
        "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/'
        'relationships"><Relationship Id="r" Type="http://schemas.openxmlformats.org/'
        'officeDocument/2006/relationships/officeDocument" Target="xl/workbook.xml"/>'
        "</Relationships>",
    }
    names, links = "", ""
    for number, rows in enumerate(sheets, 1):
        names += f'<sheet name="Sheet{number}" sheetId="{number}" r:id="r{number}"/>'
        links += (
            f'<Relationship Id="r{number}" Type="http://schemas.openxmlformats.org/officeDocument/'
            f'2006/relationships/worksheet" Target="worksheets/sheet{number}.xml"/>'
        )
        lines = []
        for at, row in enumerate(rows, 1):
            cells = ""
            for column, value in zip("ABCDEF", row, strict=False):
                if isinstance(value, Cell):
                    cells += value.format(at=f"{column}{at}")
                elif isinstance(value, int | float):
                    cells += f'<c r="{column}{at}"><v>{value}</v></c>'
                elif value is not None:
                    text = f"<is><t>{escape(value)}</t></is>"
                    cells += f'<c r="{column}{at}" t="inlineStr">{text}</c>'
            lines.append(f'<row r="{at}">{cells}</row>')
        files[f"xl/worksheets/sheet{number}.xml"] = (
            '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">'
            f"<sheetData>{''.join(lines)}</sheetData></worksheet>"
        )
    files["xl/workbook.xml"] = (
        '<workbook xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main" xmlns:r="http:'
        f'//schemas.openxmlformats.org/officeDocument/2006/relationships"><sheets>{names}</sheets>'
        "</workbook>"
    )
    files["xl/_rels/workbook.xml.rels"] = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f"{links}</Relationships>"
    )
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>{text}')
    return written.getvalue()


def ods(rows):
    """A workbook with one sheet, as LibreOffice writes it; all cells are texts."""
    names = ("office", "table", "text")
    spaces = " ".join(f'xmlns:{n}="urn:oasis:names:tc:opendocument:xmlns:{n}:1.0"' for n in names)
    spaces += (
        ' xmlns:calcext="urn:org:documentfoundation:names:experimental:calc:xmlns:calcext:1.0"'
    )
    kind = 'office:value-type="string"'
    lines = ""
    for row in rows:
        lines += "<table:table-row>"
        for value in row:
            text = f"<table:table-cell {kind}><text:p>{value}</text:p></table:table-cell>"
            lines += value if isinstance(value, Cell) else text
        lines += "</table:table-row>"
    content = (
        f"<office:document-content {spaces}><office:body><office:spreadsheet>"
        f'<table:table table:name="S">{lines}</table:table>'
        "</office:spreadsheet></office:body></office:document-content>"
    )
    manifest = "urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        file.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        file.writestr("content.xml", content)
        file.writestr("META-INF/manifest.xml", f'<m:manifest xmlns:m="{manifest}"/>')
    return sink.getvalue()
